"""One rank of a training that is restarted while Python collects no cycles: `released.py FOLDER`.

It prints how many descriptors the process has after the second restart and after the last one, and
how many models of the iterations before it holds. Both go down a moment after a restart, so it
waits for the expected numbers, and prints what it has in the end.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref

import torch
import torch.distributed as dist
from planned_faults import say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader

RESTARTS = 10
HELD = 1  # by the job: its state is where the next iteration continues
ROOM = 4  # descriptors that come and go; a leak is two or more a restart
NET_S = 40.0
models: list[weakref.ref[nn.Module]] = []
before = 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def held() -> int:
    return sum(model() is not None for model in models)


def check(iteration: int) -> None:
    global before
    deadline = time.monotonic() + NET_S
    while held() > HELD or (before and descriptors() > before + ROOM):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if iteration == 2:
        before = descriptors()
    if iteration == RESTARTS:
        say("released", models=held(), before=before, after=descriptors())


@inprocess.Wrapper(repeated_faults=None)
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    if call.iteration in (2, RESTARTS):
        check(call.iteration)
        dist.barrier()
    torch.manual_seed(1)
    model = nn.Linear(64, 64)
    models.append(weakref.ref(model))
    optimizer = torch.optim.Adam(model.parameters())
    loader = ElasticLoader(TensorDataset(torch.ones(64, 64)), global_batch_size=4, seed=1)
    with outlast.Job(
        sys.argv[1], model=model, optimizer=optimizer, loader=loader, every=1, linger=0
    ) as job:
        job.restore()
        ddp = DistributedDataParallel(model)
        for (samples,) in loader:
            ddp(samples).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            if call.iteration >= RESTARTS:
                break
            if job.rank == call.iteration % 2:
                raise ValueError("a planned fault")  # while the save of this step is in progress
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    train()
