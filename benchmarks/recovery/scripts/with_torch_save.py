"""`torch.save` by rank 0, and a restart of all processes: what torchrun's tutorial does."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.training import Run, group_store, launched_rank, time_limit


def main() -> None:
    run = Run(launched_rank())
    size, limit = int(os.environ["WORLD_SIZE"]), time_limit("timeout")
    dist.init_process_group("gloo", store=group_store(), rank=run.rank, world_size=size, **limit)
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
        run.loss(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.completed(step)
        if run.rank == 0 and step % run.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, f"{snapshot}.new")
            os.replace(f"{snapshot}.new", snapshot)  # a kill while it is written loses nothing


if __name__ == "__main__":
    main()
