"""Trains with a wrapper, DDP and a `Job`, on batches that depend on step and rank alone.

`trains.py CHECKPOINTS STEPS` prints the exact loss of each step, and a hash of the final weights.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast import Job, chaos, inprocess

RANK = int(os.environ["RANK"])


def say(**fields: object) -> None:
    """Prints one line, in one write."""
    os.write(1, json.dumps({"rank": RANK, **fields}).encode() + b"\n")


@inprocess.Wrapper(
    soft_timeout=datetime.timedelta(seconds=3),
    ping_timeout=datetime.timedelta(seconds=3),
    hard_timeout=datetime.timedelta(seconds=6),
    monitor_process_interval=datetime.timedelta(milliseconds=200),
)
def train(path: str, steps: int, call: inprocess.CallWrapper | None = None) -> str:
    """Trains to the end, from the newest state."""
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Its state is some pages per rank and kind of tensor, so writes can be torn in the middle.
    module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Job(path, model=model, optimizer=optimizer, every=2, keep=3) as job:
        job.restore()
        while job.steps < steps:
            step = job.steps + 1
            chaos.step(step)
            call.ping()
            generator = torch.Generator().manual_seed(1000 * step + RANK)
            batch = torch.randn(8, 64, generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            say(step=step, loss=loss.item().hex(), iteration=call.iteration)
            job.step()
    content = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    dist.destroy_process_group()
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    say(weights=train(sys.argv[1], int(sys.argv[2])))
