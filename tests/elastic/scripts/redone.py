"""Trains with `Job` under `Wrapper`, and fails in chosen steps: which steps are redone is known.

redone.py PATH STEPS FAILS [LIVE]   # FAILS: a JSON list of steps; the last rank fails in each, once
                                    # LIVE: "live" to continue from the state of the survivors
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.inprocess import CallWrapper, Wrapper

PATH, STEPS, FAILS = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
LIVE = sys.argv[4:] == ["live"]
EVERY = 5


@Wrapper()
def train(call: CallWrapper) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.Job(PATH, model=model, optimizer=optimizer, every=EVERY, live=LIVE) as job:
        job.restore()
        while job.steps < STEPS:
            call.ping()
            if call.iteration < len(FAILS) and job.steps + 1 == FAILS[call.iteration]:
                job.checkpointer.wait()  # which step the restart restores must not be a race,
                dist.barrier()  # nor whether the other rank has completed it
                if rank == size - 1:
                    raise RuntimeError("a planned exception")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            job.step(samples=4)
            if job.steps == 3:
                print(json.dumps({"event": "trains"}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
    print(json.dumps({"event": "ended", "rank": os.environ["RANK"]}), flush=True)
