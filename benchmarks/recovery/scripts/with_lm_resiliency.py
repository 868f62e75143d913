"""lm-resiliency (GEMINI): checkpoints in memory and at a peer, and a restart of all by torchrun.

Processes that end by an exception or SIGTERM write their own checkpoint and their peer's to disk,
from where the restarted ones load them. Its own rendezvous backend is not used: torch 2.13 cannot
register it, and it restarts nothing until a manager outside the job publishes a plan. Its detection
of faulty devices needs CUDA.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.training import Run, group_store, launched_rank, time_limit


def main() -> None:
    run = Run(launched_rank())
    size, limit = int(os.environ["WORLD_SIZE"]), time_limit("timeout")
    dist.init_process_group("gloo", store=group_store(), rank=run.rank, world_size=size, **limit)
    model = run.model()
    optimizer = run.optimizer(model)
    resiliency = enable_resiliency(
        model,
        optimizer,
        interval=run.every,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            disk_flush_interval=run.every,
            disk_folder=str(run.checkpoints),
            run_id="recovery",
            pin_memory=False,
        ),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    ddp = DistributedDataParallel(model)
    while True:
        run.loss(ddp, resiliency.step_count).backward()
        optimizer.step()  # counts the step, and saves
        optimizer.zero_grad()
        run.completed(resiliency.step_count)


if __name__ == "__main__":
    main()
