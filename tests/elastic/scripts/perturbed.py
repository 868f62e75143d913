"""Two ranks of sharpness-aware minimization: `perturbed.py PLAN`. The plan is JSON: `path`, the
folder; `ranks`, those that write to the parameters before the optimizer's step; `first`, the first
step that does; `end`, the last step; `every` and `overlap` of the job.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import RANK, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import inprocess

PLAN: dict[str, Any] = json.loads(sys.argv[1])


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(160, 160) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 160)).square().mean().backward()

    options = {name: PLAN[name] for name in ("path", "every", "overlap")}
    with outlast.Job(**options, model=model, optimizer=optimizer, keep=100) as job:
        job.restore()
        while job.steps < PLAN["end"]:
            backward()
            before = [p.detach().clone() for p in model.parameters()]
            if RANK in PLAN["ranks"] and job.steps + 1 >= PLAN["first"]:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=0.05)
            backward()
            if RANK in PLAN["ranks"] and job.steps + 1 >= PLAN["first"]:
                with torch.no_grad():
                    for p, value in zip(model.parameters(), before, strict=True):
                        p.copy_(value)
            optimizer.step()
            job.step()
    total = sum(p.double().sum().item() for p in model.parameters())
    say("ended", iteration=call.iteration, total=total.hex())


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    train()
