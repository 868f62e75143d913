"""Training that replaces checkpoints, and all the ways in which it ends in order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import RANK, join_group, leave_group, main, meet, say, scenario
from torch.nn.parallel import DistributedDataParallel

from async_checkpoint.checkpoints import NET
from outlast import Job
from outlast.async_checkpoint import Retention
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.errors import RestartAbort
from outlast.inprocess import CallWrapper, Wrapper


def train(path: str, how: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(40, 30)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(net.parameters())
    with Job(path, model=model, optimizer=optimizer, every=2, keep=Retention(last=1)) as job:
        job.restore()
        for step in range(100):
            optimizer.zero_grad()
            model(torch.ones(4, 40)).sum().backward()
            optimizer.step()
            if step == 7:
                end(job, Path(path), how)
                if how == "returns":
                    return
            job.step()


def end(job: Any, path: Path, how: str) -> None:
    job.checkpointer.wait(NET)
    limit = time.monotonic() + 60
    while RANK == 0 and not (path / RECYCLED).exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    meet()
    say("ending")
    if how == "exception" and RANK == 1:
        raise ValueError("planned")
    if how.startswith("RestartAbort") and RANK == 1:
        if "save" in how:
            job.save()
        raise RestartAbort("planned")
    if how == "SIGTERM" and RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "SystemExit":
        raise SystemExit(3)
    if "save" in how:
        job.save()


@scenario
def ends(path: str, how: str) -> None:
    if how.startswith("RestartAbort"):

        @Wrapper()
        def run(call: CallWrapper) -> None:
            dist.init_process_group("gloo")
            train(path, how)

        run()
    join_group()
    train(path, how)
    leave_group()


if __name__ == "__main__":
    main()
