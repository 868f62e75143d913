"""A Lightning user's program: `outlast run own_lightning.py PLAN`, see `own_programs.py`.

Its points: `step N`, at the begin of a batch; `batch_end N`, in the hook after the optimizer's
step; `closed N`, before the validation after step N; `validation E`; `epoch E`, at its end.
"""

import json
import random
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from planned_faults import RANK, PlannedFaults, say
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.lightning import JobCallback

PLAN = json.loads(sys.argv[1])
reach = PlannedFaults(PLAN, {}).reach


def computed(name: str, value: Any) -> None:
    say("computed", name=name, value=value)


class Classifier(pl.LightningModule):
    def __init__(self, iteration: int) -> None:
        super().__init__()
        self.iteration = iteration
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.Linear(32, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        step = self.global_step + 1
        reach(f"step {step}", self.iteration)
        loss = functional.cross_entropy(self.net(batch[0]), batch[1]) + 0.01 * random.random()
        computed(f"step {step}", [loss.item(), self.optimizers().param_groups[0]["lr"]])
        self.log("mean", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        reach(f"batch_end {self.global_step}", self.iteration)

    def on_validation_model_zero_grad(self) -> None:
        reach(f"closed {self.global_step}", self.iteration)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            reach(f"validation {self.current_epoch}", self.iteration)
        noise = 0.01 * random.random()
        loss = functional.cross_entropy(self.net(batch[0]), batch[1]) + noise
        self.log("loss", loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        reach(f"epoch {self.current_epoch}", self.iteration)
        computed(f"epoch {self.current_epoch}", self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> Any:
        kind = torch.optim.LBFGS if PLAN.get("closure") else torch.optim.AdamW
        optimizer = kind(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.1
        )
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss"}]


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(256, 20)
    y = (x[:, :4].sum(1) > 0).long()
    loader = ElasticLoader(TensorDataset(x, y), global_batch_size=32)
    random.seed(RANK)
    job = JobCallback(f"{PLAN['path']}", loader=loader, call=call, every=100)

    class Restored(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            assert job.job is not None
            say("restored", step=job.job.steps, source=job.job.restored_from)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=call.state.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=PLAN.get("epochs", 5),
        max_steps=PLAN.get("steps", -1),
        callbacks=[job, Restored(), EarlyStopping("mean_epoch", patience=10)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Classifier(call.iteration)
    trainer.fit(module, loader, DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16))
    computed("weights", sum(p.double().sum().item() for p in module.parameters()).hex())
    computed("random", random.random())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
