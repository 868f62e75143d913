"""One rank of a training with quantized weights and 8-bit moments: `python quantized.py PLAN`.

The plan is JSON; its `faults` are those of `planned_faults`, at `done N`, after step N. `kind` is
`own`, a subclass of the tests', or `torchao`. The training ends after step `stop`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

sys.path.append(str(Path(__file__).parents[2]))
from scaled_tensors import Momentum8, Scaled

PLAN: dict[str, Any] = {"kind": "own", "every": 4, "stop": 8, "faults": []}
PLAN.update(json.loads(sys.argv[1]))
reach = PlannedFaults(PLAN, {}).reach


class Base(nn.Module):
    """A frozen layer with quantized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled.of(torch.randn(64, 64)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    head = DistributedDataParallel(nn.Linear(64, 64))
    if PLAN["kind"] == "own":
        return Base(), head, Momentum8(head.parameters(), 0.01)
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]
    from torchao.quantization import (  # type: ignore[import-not-found]
        Int8WeightOnlyConfig,
        quantize_,
    )

    base = nn.Sequential(nn.Linear(64, 64))
    quantize_(base, Int8WeightOnlyConfig())
    return base.requires_grad_(False), head, AdamW8bit(head.parameters(), 0.01)


def content(value: Any) -> str:
    """A digest of all tensors in a nested state, and of those that they wrap."""
    if isinstance(value, dict):
        return "".join(content(each) for each in value.values())
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        inner = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        return f"{type(value).__name__} {content(inner)}"
    return xxhash.xxh3_64_hexdigest(torch.as_tensor(value).detach().numpy().tobytes())


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    # Other weights in each run and iteration: only what is restored counts.
    torch.manual_seed(0 if not Path(PLAN["path"]).exists() else 1)
    base, head, optimizer = build()
    models = {"base": base, "head": head}
    with outlast.Job(
        PLAN["path"], model=models, optimizer=optimizer, every=PLAN["every"], signals=()
    ) as job:
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration)
        while job.steps < PLAN["stop"]:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(job.steps))
            loss = head(base(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            say("trained", step=job.steps, iteration=call.iteration, loss=loss.item().hex())
            reach(f"done {job.steps}", call.iteration)
        moments = optimizer.state_dict()["state"]
        return content({"model": job.module.state_dict(), "moments": moments})


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())
