"""nvidia-resiliency-ext: its in-process wrapper under its launcher.

Its own asynchronous save calls `torch.cuda.synchronize`, which raises without a GPU: so rank 0
saves with `torch.save`. An exception restarts the function in place; after a SIGKILL its launcher
restarts all processes.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.training import Run, launched_rank, time_limit

# The smallest values with which its groups reliably connect on a busy host.
_GLOO = datetime.timedelta(seconds=5)


def train(call: Any = None) -> None:
    run = Run(launched_rank())
    kinds: Any = dist
    agent = kinds.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = kinds.PrefixStore(f"group/{attempt}/{call.iteration}", agent)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=size, timeout=_GLOO)
    model = run.model()
    optimizer = run.optimizer(model)
    snapshot, step = run.folder / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    while True:
        call.ping()
        run.loss(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.completed(step)
        if run.rank == 0 and step % run.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, f"{snapshot}.new")
            os.replace(f"{snapshot}.new", snapshot)


if __name__ == "__main__":
    # Where this variable is set, 0.7 checks the rank's GPU before it restarts in place, and a host
    # without one fails that check.
    os.environ.pop("LOCAL_RANK", None)
    train.__annotations__["call"] = inprocess.CallWrapper
    inprocess.Wrapper(**time_limit("soft_timeout"))(train)()
