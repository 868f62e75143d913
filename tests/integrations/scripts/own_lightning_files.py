"""A Lightning user's program with a data module, a `CSVLogger` or a `TensorBoardLogger`, and a
`ModelCheckpoint` that keeps the best: `outlast run own_lightning_files.py PLAN`, see
`own_programs.py`.

Its points: `step N`, at the begin of a batch; `validation E`; `epoch E`, at its end.
"""

import json
import random
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from planned_faults import RANK, PlannedFaults, say
from torch import nn
from torch.utils.data import DataLoader, Dataset

from outlast import inprocess
from outlast.integrations.lightning import JobCallback

PLAN = json.loads(sys.argv[1])
reach = PlannedFaults(PLAN, {}).reach


def computed(name: str, value: Any) -> None:
    say("computed", name=name, value=value)


class Augmented(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.x = torch.randn(length, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index] + 0.1 * torch.randn(20) + 0.1 * random.random()
        return index, x, self.x[index, :4].sum()


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(160), batch_size=16, shuffle=True, num_workers=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(32), batch_size=16)


class Regression(pl.LightningModule):
    def __init__(self, iteration: int) -> None:
        super().__init__()
        self.iteration = iteration
        self.net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        step = self.global_step + 1
        reach(f"step {step}", self.iteration)
        loss = nn.functional.mse_loss(self.net(batch[1]).squeeze(1), batch[2])
        computed(f"step {step}", [batch[0].tolist(), loss.item()])
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            reach(f"validation {self.current_epoch}", self.iteration)
        loss = nn.functional.mse_loss(self.net(batch[1]).squeeze(1), batch[2])
        self.log("loss", loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        reach(f"epoch {self.current_epoch}", self.iteration)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    pl.seed_everything(0, verbose=False)
    random.seed(RANK)
    job = JobCallback(f"{PLAN['path']}", call=call, every=100)

    class Restored(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            assert job.job is not None
            say("restored", step=job.job.steps, source=job.job.restored_from)

    logger = CSVLogger(f"{PLAN['path']}-logs")
    if PLAN.get("tensorboard"):
        logger = TensorBoardLogger(f"{PLAN['path']}-logs", purge_step=0)
    best = ModelCheckpoint(monitor="loss", save_top_k=2, enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=call.state.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=5,
        log_every_n_steps=2,
        callbacks=[best, job, Restored()],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression(call.iteration)
    trainer.fit(module, datamodule=Data())
    computed("weights", sum(p.double().sum().item() for p in module.parameters()).hex())
    computed("best", [best.best_model_path.partition("-logs")[2], str(best.best_model_score)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
