"""FSDP2: an expert gets its first gradient in step 6: `python lazy_expert.py PATH STOP OPTIMIZER`.

The job stops after step STOP, if that is not 0. With a number of steps as a fourth argument, the
expert is trained in the first two and from step 6 on, and frozen in between; it begins as it is
after so many steps.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import say
from torch import nn
from torch.distributed.fsdp import fully_shard

import outlast

FREEZES = len(sys.argv) > 4
PATH, STOP, KIND = sys.argv[1], int(sys.argv[2]), sys.argv[3]
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, dampening=0.5),
}


def freeze(expert: nn.Module, steps: int) -> None:
    expert.requires_grad_(not 2 <= steps < 5)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "expert": nn.Linear(6, 6)})
    if FREEZES:
        freeze(model["expert"], int(sys.argv[4]))
    for each in model.values():
        fully_shard(each)
    optimizer = OPTIMIZERS[KIND](model.parameters())
    with outlast.Job(PATH, model=model, optimizer=optimizer, every=1) as job:
        job.restore()
        while job.steps < 8:
            torch.manual_seed(100 + job.steps)
            output = model["first"](torch.randn(4, 6))
            if FREEZES:
                freeze(model["expert"], job.steps)
            if FREEZES or job.steps >= 5:
                output = model["expert"](output)
            output.pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            if job.steps == STOP:
                break
    whole = [each.full_tensor().flatten().tolist() for each in model.parameters()]  # type: ignore[attr-defined]
    steps = [float(each["step"]) for each in optimizer.state.values() if "step" in each]
    say("ended", whole=whole, steps=steps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
