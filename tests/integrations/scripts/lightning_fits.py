"""Fits with and without a fault in the training or the validation, in one process.

python lightning_fits.py FOLDER: prints one JSON line per scenario, with what the fit without the
fault printed, and what the fit with it and the one that continues printed.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, OnExceptionCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from outlast.elastic import ElasticLoader
from outlast.integrations.lightning import JobCallback

# Trainer options and `every`; and where the faults are: a batch, or an epoch's validation.
SCENARIOS: list[tuple[dict[str, Any], Any]] = [
    ({"every": 1}, 9),  # after the last batch of an epoch
    ({"every": 1}, 12),  # within an epoch
    ({"every": 1}, ["validation", 1]),
    ({"every": 4, "plateau": True}, 18),
    ({"every": 1, "val_check_interval": 0.5}, 13),  # after a validation within an epoch
    ({"every": 1, "accumulate_grad_batches": 3}, 15),  # with gradients accumulated
]


class FaultError(Exception):
    pass


class Classifier(pl.LightningModule):
    def __init__(self, plateau: bool, fault: Any) -> None:
        super().__init__()
        self.plateau, self.fault = plateau, fault
        self.lines: list[str] = []
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if number == self.fault:
            raise FaultError
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        rate = self.optimizers().param_groups[0]["lr"]
        self.lines.append(f"batch {number}, {batch_idx}: {loss.item()!r} {rate!r}")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fault == ["validation", self.current_epoch] and not self.trainer.sanity_checking:
            raise FaultError
        self.log("loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["loss"].item()
            self.lines.append(f"validation {self.current_epoch} {self.global_step} {loss!r}")

    def on_train_epoch_end(self) -> None:
        self.lines.append(f"epoch {self.current_epoch} {self.global_step}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.plateau:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.3
        )
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss"}]


def fit(path: str, options: dict[str, Any], fault: Any, lines: list[str]) -> None:
    options = dict(options)
    every, plateau = options.pop("every"), options.pop("plateau", False)
    pl.seed_everything(0, verbose=False)
    x = torch.randn(256, 20)
    y = (x[:, :4].sum(1) > 0).long()
    loader = ElasticLoader(TensorDataset(x, y), global_batch_size=32)
    job = JobCallback(f"{path}/checkpoints", loader=loader, every=every)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        # The last one saves on every exception: it must not.
        callbacks=[job, EarlyStopping("loss", patience=10), OnExceptionCheckpoint(path)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    module = Classifier(plateau, fault)
    saved: list[str] = []
    save_checkpoint = trainer.save_checkpoint
    trainer.save_checkpoint = lambda path: (saved.append(str(path)), save_checkpoint(path))
    try:
        trainer.fit(module, loader, DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16))
    finally:
        lines.extend([*module.lines, *(f"saved {path}" for path in saved)])
    lines.append(sum(p.double().sum().item() for p in module.parameters()).hex())


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for options, fault in SCENARIOS:
        expected: list[str] = []
        found: list[str] = []
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as path:
            fit(path, options, None, expected)
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as path:
            try:
                fit(path, options, fault, found)
            except FaultError:
                fit(path, options, None, found)
        print(json.dumps([f"{options} {fault}", expected, found]), flush=True)


if __name__ == "__main__":
    main()
