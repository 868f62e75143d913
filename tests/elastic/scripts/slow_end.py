"""Trains two steps with `Job` under `Wrapper`; the last save takes longer than the soft timeout.

slow_end.py PATH SECONDS
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import outlast
from outlast.async_checkpoint.save.save import Save
from outlast.inprocess import CallWrapper, Wrapper

PATH, SECONDS = sys.argv[1], float(sys.argv[2])
STEPS = 2

_complete = Save.complete


def slowly(save: Save) -> Any:
    if save.step == STEPS:
        time.sleep(SECONDS)
    return _complete(save)


Save.complete = slowly  # type: ignore[method-assign]


@Wrapper(soft_timeout=datetime.timedelta(seconds=SECONDS / 2))
def train(call: CallWrapper) -> int:
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.Job(PATH, model=model, optimizer=optimizer) as job:
        job.restore()
        while job.steps < STEPS:
            call.ping()
            optimizer.step()
            job.step(samples=1)
    dist.destroy_process_group()
    return call.iteration


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({"event": "ended", "iteration": train()}), flush=True)
