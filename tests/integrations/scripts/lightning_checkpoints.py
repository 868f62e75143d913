"""Checkpoints of `ModelCheckpoint` through `BackgroundCheckpointIO`, with a fault and with damage.

python lightning_checkpoints.py FOLDER: prints one JSON line, as `lightning_fits.py` does.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from outlast.elastic import ElasticLoader
from outlast.errors import CheckpointError
from outlast.integrations.lightning import BackgroundCheckpointIO


class FaultError(Exception):
    pass


class Classifier(pl.LightningModule):
    def __init__(self, fault: int | None, lines: list[str]) -> None:
        super().__init__()
        self.fault, self.lines = fault, lines
        self.net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fault:
            raise FaultError
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.lines.append(f"step {self.global_step}: {loss.item()!r}")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(path: Path, fault: int | None, lines: list[str]) -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(256, 20)
    loader = ElasticLoader(TensorDataset(x, (x[:, :4].sum(1) > 0).long()), global_batch_size=32)
    module = Classifier(fault, lines)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        callbacks=[ModelCheckpoint(path, every_n_train_steps=3, save_top_k=1, save_last=True)],
        plugins=[BackgroundCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, loader, ckpt_path="last")
    lines.append(sum(p.double().sum().item() for p in module.parameters()).hex())


def damage(path: Path) -> None:
    """Changes one byte in the largest file of each checkpoint."""
    for folder in (path / ".outlast").glob("step-*"):
        file = max(folder.iterdir(), key=lambda each: each.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def error_of_load(path: Path) -> str:
    checkpoints = BackgroundCheckpointIO()
    try:
        checkpoints.load_checkpoint(path)
    except CheckpointError as e:
        return str(e)
    finally:
        checkpoints.teardown()
    return "none"


def check_removal_of_a_save_in_progress(path: Path) -> None:
    checkpoints = BackgroundCheckpointIO(max_in_flight=2)
    state = {"state_dict": {"weight": torch.ones(4_000_000)}}
    for name in ("first.ckpt", "second.ckpt"):
        checkpoints.save_checkpoint(state, path / name)
    checkpoints.remove_checkpoint(path / "first.ckpt")  # it does not exist yet
    checkpoints.teardown()
    pointers = [each.name for each in path.iterdir() if each.is_file()]
    assert pointers == ["second.ckpt"], pointers


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    expected: list[str] = []
    found: list[str] = []
    fit(folder / "undisturbed", None, expected)
    path = folder / "disturbed"
    try:
        fit(path, 13, found)
    except FaultError:
        saved = len(found)
        fit(path, None, found)
        assert len(found) == saved + 25 - 12, "not continued at step 12"
    pointers = sorted(each.name for each in path.iterdir() if each.is_file())
    numbers = sorted(each.name for each in (path / ".outlast").glob("step-*"))
    assert pointers == ["epoch=2-step=24.ckpt", "last.ckpt"], pointers
    assert len(numbers) in (2, 3), numbers  # one whose pointer was replaced at the very end
    assert error_of_load(path / "last.ckpt") == "none"
    damage(path)
    assert "damaged" in error_of_load(path / "last.ckpt"), error_of_load(path / "last.ckpt")
    check_removal_of_a_save_in_progress(folder / "removal")
    print(json.dumps(["checkpoint io", expected, found]), flush=True)


if __name__ == "__main__":
    main()
