"""One rank of the pipeline of docs/elastic.md, with a small model: `main(PLAN)`.

The plan is JSON; its faults are those of `planned_faults`. The points of step N, on each stage:
`forward N`; `micro N M` in the forward pass of microbatch M, and `back N M` in its backward pass;
`done N`. `schedule` is another one of `torch.distributed.pipelining`. With `traced`, `pipeline()`
splits the model. Without a number of `steps`, it makes three more once the file `go` is there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed import pipelining
from torch.utils.data import TensorDataset

import outlast
from outlast.inprocess.running_call import running_call

PAGE = Path(__file__).parents[3] / "docs" / "elastic.md"
PLAN: dict[str, Any] = {"steps": 12, "schedule": "Schedule1F1B", "traced": False, "faults": []}
PLAN["wrapper"] = "Wrapper()"
WIDTH, MICROBATCHES = 6, 4
JOB: list[Any] = []
PIPE: list[Any] = []
INPUT, HIDDEN = torch.zeros(8, 4), torch.zeros(8, WIDTH, requires_grad=True)
OUTPUT = torch.zeros(8, 1, requires_grad=True)


def reach(point: str) -> None:
    call: Any = running_call()
    PLAN["reach"](point, call.state.iteration)


def with_points(stage: nn.Module) -> nn.Module:
    """A step has one pass for each microbatch."""
    passes = itertools.count()

    def passed(_: nn.Module, __: object, hidden: torch.Tensor) -> None:
        at = f"{JOB[0].steps + 1} {next(passes) % MICROBATCHES}"
        reach(f"micro {at}")
        hidden.register_hook(lambda _: reach(f"back {at}"))

    stage.register_forward_hook(passed)
    return stage


def make_stage(number: int) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(4, WIDTH), nn.Dropout(0.2), nn.Tanh()]
    last = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    if not PLAN["traced"]:
        return with_points(nn.Sequential(*(last if number else first)))
    split = {str(len(first)): pipelining.SplitPoint.BEGINNING}
    PIPE[:] = [pipelining.pipeline(nn.Sequential(*first, *last), (INPUT,), split_spec=split)]
    return with_points(PIPE[0].get_stage_module(number))


def traced_stage(ddp: Any, number: int, device: torch.device, group: Any, **_: object) -> Any:
    """It takes no DDP, whose group is this rank alone."""
    return pipelining.build_stage(ddp.module, number, PIPE[0].info(), device, group)


def ended() -> bool:
    (job,) = JOB
    if PLAN["steps"] is None:
        time.sleep(0.02)
        go = torch.tensor(Path("go").exists(), dtype=torch.int32)
        dist.all_reduce(go, dist.ReduceOp.MIN)
        PLAN["steps"] = job.steps + 3 if go else None
    if job.steps != PLAN["steps"]:
        reach(f"forward {job.steps + 1}")
        return False
    content = hashlib.sha256()
    for optimizer in job.optimizer.values():
        for parameter, moments in optimizer.state.items():
            for tensor in (parameter.detach(), *moments.values()):
                content.update(tensor.numpy().tobytes())
    say("ended", state=content.hexdigest())
    return True


def watch() -> None:
    """Says what the job restores, and each step."""
    restore, step = outlast.Job.restore, outlast.Job.step

    def restored(job: outlast.Job) -> int:
        JOB[:] = [job]
        found, call = restore(job), running_call()
        assert call is not None
        say("restored", step=found, source=job.restored_from, iteration=call.state.iteration)
        return found

    def stepped(job: outlast.Job) -> None:
        total = sum(float(each.detach().sum()) for each in job.module.parameters())
        say("trained", step=job.steps + 1, loss=total.hex())
        step(job)
        reach(f"done {job.steps}")
        if job.steps == 4:
            job.checkpointer.wait()

    outlast.Job.restore, outlast.Job.step = restored, stepped  # type: ignore[method-assign, assignment]


def main(plan: str) -> None:
    PLAN.update(json.loads(plan))
    PLAN["reach"] = PlannedFaults(PLAN, {"pause": lambda: time.sleep(0.3)}).reach
    torch.set_num_threads(1)
    code = PAGE.read_text().partition("## Pipelines\n")[2].split("```python\n")[1].split("```")[0]
    changes = {
        '"checkpoints", ': f"{PLAN['path']!r}, every=4, ",
        "Wrapper()": PLAN["wrapper"],
        "Schedule1F1B": PLAN["schedule"],
        "epochs(10)": "epochs(10**9)",
        "call.ping()": "call.ping()\n                if ended(): return",
    }
    if PLAN["traced"]:
        changes[" PipelineStage("] = " traced_stage("
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    inputs = torch.randn(320, 4, generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "example_inputs": [INPUT, HIDDEN],
        "example_outputs": [HIDDEN, OUTPUT],
        "loss_fn": nn.functional.mse_loss,
        "make_optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        "make_stage": make_stage,
        "ended": ended,
        "traced_stage": traced_stage,
    }
    exec(compile(code, str(PAGE), "exec"), names)
    watch()
    names["train"]()
