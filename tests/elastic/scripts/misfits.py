"""A wrapped `Job` that no restart can help: `SCRIPT PATH MISTAKE`.

MISTAKE is "none", "no restore" or "other model". Prints how often the function began.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import outlast
from outlast import inprocess

PATH, MISTAKE = sys.argv[1:]


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    os.write(1, json.dumps({"iteration": call.iteration}).encode() + b"\n")
    dist.init_process_group("gloo")
    model = nn.Linear(2, 3 if MISTAKE == "other model" else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.Job(PATH, model=model, optimizer=optimizer, every=2) as job:
        if MISTAKE != "no restore":
            job.restore()
        for _ in range(5):
            call.ping()
            job.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
