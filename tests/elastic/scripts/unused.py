"""Steps of `ConsistentDDP` on a module whose branches are used by some parts: `python unused.py`.

Each rank prints, for each step and branch, a hash of the gradients and weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch import nn

from outlast.elastic import ConsistentDDP

PARTS = 6
# The parts of each step that use the branch `rare`: parts of one replica, of several, or none.
RARE = ((5,), (0,), (), (1, 4), (2,), ())
# The parts of each step with weight 0; they use all branches.
EMPTY = ((), (), (3, 4), (), (5,), (0, 5))


@dataclasses.dataclass
class Part:
    """Stands in for a loader."""

    part: int
    weight: float
    boundary: bool


class Branches(nn.Module):
    """Has several dtypes, so that the gradients need several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.rare = nn.Linear(4, 4)
        self.rare_half = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.never = nn.Linear(4, 4)
        self.never_double = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, data: torch.Tensor, *branches: str) -> torch.Tensor:
        found: torch.Tensor = self.trunk(data).tanh()
        for name in branches:
            branch: nn.Linear = getattr(self, name)
            found = found + branch(found.to(branch.weight.dtype)).to(found.dtype)
        return found


def say(event: str, **fields: object) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def bits(tensors: list[torch.Tensor]) -> str:
    content = [each.detach().flatten().contiguous().view(torch.uint8) for each in tensors]
    return hashlib.sha256(torch.cat(content).numpy().tobytes()).hexdigest()[:16]


def run_part(model: nn.Module, step: int, part: int) -> None:
    """Forward and backward pass of one part, the same on any rank."""
    data = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + part))
    if part in EMPTY[step]:
        branches = ["rare", "rare_half", "never", "never_double"]
    else:
        branches = ["rare", "rare_half"] if part in RARE[step] else []
    model(data, *branches).square().mean().backward()


def weight(step: int, part: int) -> float:
    return 0.0 if part in EMPTY[step] else (part + 1) / 21


def expected(module: nn.Module, step: int) -> list[torch.Tensor | None]:
    """The gradients, summed in this process, part by part, starting from zero."""
    parameters = list(module.parameters())
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for part in range(PARTS):
        module.zero_grad()
        run_part(module, step, part)
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None and weight(step, part) > 0:
                before = sums[i]
                start = torch.zeros_like(parameter) if before is None else before
                sums[i] = start + parameter.grad * weight(step, part)
    return sums


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # rank 0's weights are broadcast
    module = Branches()
    model = ConsistentDDP(module, PARTS)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(len(RARE)):
        sums = expected(module, step)
        for part in model.parts:
            with model.part(Part(part, weight(step, part), part == model.parts[-1])):
                run_part(model, step, part)
        gradients = [parameter.grad for parameter in module.parameters()]
        right = all(map(same, gradients, sums))
        optimizer.step()
        branches = {}
        for name, branch in module.named_children():
            found = [p.grad for p in branch.parameters() if p.grad is not None]
            weights = bits(list(branch.parameters()))
            branches[name] = {"gradient": bits(found) if found else None, "weights": weights}
        say("step", right=right, branches=branches)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
