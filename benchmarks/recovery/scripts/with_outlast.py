"""Restart in place, background saves, the state of the replica that survived: `outlast run`."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.recovery.training import Run, launched_rank, time_limit
from outlast import inprocess


@inprocess.Wrapper(**time_limit("soft_timeout"))
def train(call: inprocess.CallWrapper) -> None:
    run = Run(launched_rank())
    dist.init_process_group("gloo")
    model = run.model()
    optimizer = run.optimizer(model)
    with outlast.Job(run.checkpoints, model=model, optimizer=optimizer, every=run.every) as job:
        job.restore()
        ddp = DistributedDataParallel(model)
        while True:
            call.ping()
            run.loss(ddp, job.steps).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            run.completed(job.steps)


if __name__ == "__main__":
    train()
