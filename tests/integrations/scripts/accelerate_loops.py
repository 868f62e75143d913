"""Training loops with accelerate, with and without a fault, in one process.

python accelerate_loops.py FOLDER: prints one JSON line, as `lightning_fits.py` does.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from outlast.elastic import ElasticLoader
from outlast.integrations.accelerate import make_job, reset_state

ACCUMULATED = 2


class FaultError(Exception):
    pass


def train(path: Path, fault: int | None, lines: list[str]) -> None:
    reset_state()
    torch.manual_seed(0)
    x = torch.randn(240, 20)
    loader = ElasticLoader(TensorDataset(x, (x[:, :4].sum(1) > 0).long()), global_batch_size=16)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model: nn.Module = nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with make_job(accelerator, path, loader=loader, every=3) as job:
        batch = ACCUMULATED * accelerator.load_state()
        while loader.epoch < 3:
            for inputs, labels in loader:
                batch += 1
                if batch == fault:
                    raise FaultError
                with accelerator.accumulate(model):
                    loss = functional.cross_entropy(model(inputs), labels)
                    lines.append(f"{batch}: {loss.item()!r} {scheduler.get_last_lr()}")
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    job.step()
                if batch == 7:
                    accelerator.save_state().wait()
    lines.append(sum(p.double().sum().item() for p in model.parameters()).hex())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    expected: list[str] = []
    found: list[str] = []
    train(folder / "undisturbed", None, expected)
    try:
        train(folder / "disturbed", 20, found)
    except FaultError:
        train(folder / "disturbed", None, found)
    print(json.dumps(["accelerate", expected, found]), flush=True)


if __name__ == "__main__":
    main()
