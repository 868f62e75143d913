"""A Lightning user's program with callbacks and hooks that save, or that change the training at the
begin of an epoch: `outlast run own_lightning_callbacks.py PLAN`, see `own_programs.py`.

Its points: `batch N`, at the begin of the N-th batch of the training.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from planned_faults import RANK, PlannedFaults, say
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.lightning import JobCallback

PLAN = json.loads(sys.argv[1])
KIND: str = PLAN["kind"]
reach = PlannedFaults(PLAN, {}).reach


def computed(name: str, value: Any) -> None:
    say("computed", name=name, value=value)


class Classifier(pl.LightningModule):
    """Two layers with a mean of its own weights; saved without the frozen layer `teacher`."""

    def __init__(self, iteration: int) -> None:
        super().__init__()
        self.iteration, self.weight = iteration, 0.0
        self.teacher = nn.Linear(20, 2).requires_grad_(False)
        self.backbone = nn.Sequential(nn.Linear(20, 128), nn.BatchNorm1d(128), nn.Tanh())
        self.head = nn.Linear(128, 2)
        self.mean = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        self.updates = 0

    def on_train_epoch_start(self) -> None:
        self.weight = 1 / (2 + self.current_epoch)
        if isinstance(self.logger, CSVLogger):
            self.logger.log_metrics({"weight": self.weight}, step=self.global_step)
        self.log("epochs begun", 1.0 + self.current_epoch, reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        reach(f"batch {number}", self.iteration)
        found = self.head(self.backbone(batch[0]))
        loss = functional.cross_entropy(found, batch[1])
        loss = loss + self.weight * functional.mse_loss(found, self.teacher(batch[0]))
        rates = [group["lr"] for group in self.optimizers().param_groups]
        computed(f"batch {number}", [self.global_step, loss.item(), rates])
        return loss

    def on_after_backward(self) -> None:
        """DDP ignores the parameters that were frozen when it was made."""
        for parameter in self.backbone.parameters():
            if KIND.startswith("finetuning") and parameter.grad is not None:
                distributed.all_reduce(parameter.grad)

    def on_train_batch_end(self, *_: Any) -> None:
        self.updates += 1
        for name, parameter in self.head.named_parameters():
            self.mean[name] = self.mean[name].lerp(parameter.detach(), 0.1)

    def on_train_epoch_end(self) -> None:
        computed(
            f"epoch {self.current_epoch}", self.trainer.callback_metrics["epochs begun"].item()
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if KIND != "hooks":
            return
        checkpoint["mean"], checkpoint["updates"] = self.mean, self.updates
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if KIND == "hooks":
            self.mean, self.updates = checkpoint["mean"], checkpoint["updates"]
            assert set(checkpoint["optimizer_states"][0]) == {"state", "param_groups"}
            assert checkpoint["state_dict"].keys() == {
                name for name in self.state_dict() if not name.startswith("teacher.")
            }

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


class Steps(pl.Callback):
    """Counts through the hooks alone, and adds its count to the checkpoint."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = {"count": self.count, "in": checkpoint["epoch"]}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["batches"]["count"]


class Epochs(pl.Callback):
    """Counts the epochs that have begun."""

    count = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Unfreezing(callbacks.BaseFinetuning):
    """Trains the backbone, too, from epoch 2."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


MADE: dict[str, Any] = {
    "averaging": lambda: callbacks.EMAWeightAveraging(decay=0.9),
    "swa": lambda: callbacks.StochasticWeightAveraging(0.05, 2, annealing_epochs=3),
    "hooks": Steps,
    "finetuning": Unfreezing,
    "finetuning a backbone": lambda: callbacks.BackboneFinetuning(1, backbone_initial_lr=0.002),
    "epochs": lambda: callbacks.GradientAccumulationScheduler({1: 2, 2: 3}),
}


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(256, 20)
    y = (x[:, :4].sum(1) > 0).long()
    loader = ElasticLoader(TensorDataset(x, y), global_batch_size=32)
    job = JobCallback(f"{PLAN['path']}", loader=loader, call=call, every=8)

    class Restored(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            assert job.job is not None
            say("restored", step=job.job.steps, source=job.job.restored_from)

    made, epochs, rates = MADE[KIND](), Epochs(), callbacks.LearningRateMonitor("epoch")
    logger = CSVLogger(f"{PLAN['path']}-logs")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=call.state.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=5,
        callbacks=[Restored(), made, job, epochs, rates],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        log_every_n_steps=4,
    )
    module = Classifier(call.iteration)
    trainer.fit(module, loader)
    computed("weights", sum(p.double().sum().item() for p in module.parameters()).hex())
    computed("steps", [trainer.global_step, epochs.count, getattr(made, "count", 0)])
    if KIND == "hooks":
        computed("mean", [module.updates, *(t.double().sum().item() for t in module.mean.values())])
    if RANK == 0:
        computed("rows", Path(logger.log_dir, "metrics.csv").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
