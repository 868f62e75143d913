"""One rank of a wrapped training with two pipeline stages: `python stages.py PLAN`.

The plan is JSON; its faults are those of `planned_faults`. The first half of the ranks are replicas
of the first stage, the others of the second one. The points of step N: `forward N`, `done N`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"steps": 12, "faults": [], "await": 60}
PLAN.update(json.loads(sys.argv[1]))
ROWS, WIDTH = 8, 6
reach = PlannedFaults(PLAN, {}).reach


def passes(stage: int, model: nn.Module, inputs: torch.Tensor, other: int) -> None:
    """The forward and the backward pass of a stage, whose neighbor is rank `other`."""
    hidden = torch.empty(ROWS, WIDTH)
    if stage == 0:
        sent = model(inputs)
        dist.send(sent.detach(), other)
        dist.recv(hidden, other)
        sent.backward(hidden)
        return
    dist.recv(hidden, other)
    hidden.requires_grad_()
    (model(hidden) - inputs.sum(1, keepdim=True)).square().mean().backward()
    assert hidden.grad is not None
    dist.send(hidden.grad, other)


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(PLAN["await"])))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage, replica = divmod(rank, size // 2)
    groups = [dist.new_group(list(range(first, first + size // 2))) for first in (0, size // 2)]
    torch.manual_seed(stage)
    module = nn.Linear(WIDTH, 1) if stage else nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    name = f"stage{stage}"
    given: dict[str, Any] = {"model": {name: module}, "optimizer": {name: optimizer}}
    with outlast.Job(PLAN["path"], **given, every=4) as job:
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration, size=size)
        model = DistributedDataParallel(module, process_group=groups[stage])
        for step in range(job.steps + 1, PLAN["steps"] + 1):
            call.ping()
            reach(f"forward {step}", call.iteration)
            generator = torch.Generator().manual_seed(100 * step + replica)
            inputs = torch.randn(ROWS, 4, generator=generator)
            passes(stage, model, inputs, (rank + size // 2) % size)
            optimizer.step()
            optimizer.zero_grad()
            total = sum(float(each.detach().sum()) for each in module.parameters())
            say("trained", step=step, iteration=call.iteration, loss=total.hex())
            job.step()
            reach(f"done {step}", call.iteration)
            if job.steps == 4:
                job.checkpointer.wait()
    moments = [value.tolist() for each in optimizer.state.values() for value in each.values()]
    return repr([{name: each.tolist() for name, each in module.state_dict().items()}, moments])


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())
