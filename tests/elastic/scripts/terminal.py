"""Trains, and prints each step, until the file DONE exists: `python terminal.py CHECKPOINTS DONE
[wrapped]`. Has a data loader with a worker process, which is in the process group of its rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import outlast
from outlast import inprocess

PATH, DONE = sys.argv[1:3]
LONG = 1 << 40


class Numbers(torch.utils.data.IterableDataset[float]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from (float(i % 7) for i in range(LONG))


def done() -> bool:
    """Whether the file exists, as rank 0 sees it."""
    found = torch.tensor([Path(DONE).exists()])
    if dist.is_initialized():
        dist.broadcast(found, 0)
    return bool(found)


def run() -> None:
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(1, 1)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with outlast.Job(PATH, model=model, optimizer=optimizer, every=None) as job:
        print("RESTORED", job.restore(), flush=True)
        batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=1))
        while not done():
            model(next(batches).float().unsqueeze(1)).sum().backward()
            optimizer.step()
            job.step(samples=2)
            sys.stdout.write(f"STEP {job.steps}\n")  # in one write: two ranks share the terminal
            sys.stdout.flush()
    print("ENDED", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    inprocess.Wrapper()(run)() if "wrapped" in sys.argv else run()
