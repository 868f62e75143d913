"""One rank of a `Job` whose model differs between ranks: `python replicas.py PATH WHEN`.

WHEN is `before`: the ranks initialize their models differently; `after`: they do, and DDP gives
them equal ones; `buffers`: only the statistics of a batch norm differ, after two steps. `stages`,
`shapes`, `unrestored` (no call of `restore`): each rank has a stage of its own, with another name
or another shape; `fsdp1`: the model is sharded without DTensors.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import outlast


def say(event: str, **fields: object) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def refused(path: str, when: str) -> None:
    """A model that is not the same on all ranks."""
    rank = dist.get_rank()
    module: nn.Module = nn.ModuleDict({"all": nn.Linear(4, 6), f"stage{rank}": nn.Linear(4, 6)})
    if when == "shapes":
        module = nn.Sequential(nn.Linear(4, 6 + rank))
    elif when == "fsdp1":
        module = nn.Sequential(
            FullyShardedDataParallel(nn.Linear(4, 6), device_id=torch.device("cpu"))
        )
    optimizer = torch.optim.Adam(module.parameters())
    with outlast.Job(path, model=module, optimizer=optimizer, every=None) as job:
        try:
            if when == "unrestored":
                job.step()
            job.restore()
        except ValueError as error:
            say("refused", error=str(error))


def main(path: str, when: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    if when in ("stages", "unrestored", "shapes", "fsdp1"):
        refused(path, when)
        return
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    ddp = None if when == "before" else DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with outlast.Job(path, model=module, optimizer=optimizer, every=None) as job:
        try:
            job.restore()
        except ValueError as error:
            say("refused", error=str(error))
            return
        if when == "buffers":
            assert ddp is not None
            for _ in range(2):
                ddp(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.step()
    trained = module.state_dict()
    say("trained", state={name: tensor.tolist() for name, tensor in trained.items()})
    again = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    with outlast.Job(path, model=again, optimizer=optimizer, every=None) as job:
        job.restore()
        restored = again.state_dict()
        say("restored", state={name: tensor.tolist() for name, tensor in restored.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
