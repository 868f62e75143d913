"""A training that says when each part of an iteration's beginning is over: `useful_step` reads it.

The folder in `ROLLBACK_FOLDER` has the plan in `plan.json`. Each iteration makes a few steps, then
its ranks wait for the harness (a standby must be ready), and rank 1 fails at the beginning of the
next step. With `kept`, the model and the optimizer of a process outlive the iteration, and DDP
leaves out its broadcast after a restore: the fast way in the quickstart. With `bare`, there is no
job: as little as any must do, by torch alone.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.rollback.script import FOLDER, model_of, say
from outlast import inprocess

_FAILING = 1
_BATCH = 8
_SETTLE_S = 0.3
_WAIT_S = 300.0

PLAN: dict[str, Any] = {"faults": []}
if __name__ == "__main__":
    PLAN.update(json.loads((FOLDER / "plan.json").read_text()))
STEPS = 40 if PLAN.get("mib") == 1 else 6
"""Of an iteration, before its fault: `Adaptive` learns from them, and large ones take long."""

_kept: list[tuple[nn.Module, torch.optim.Optimizer]] = []
_noted: list[dict[str, Any]] = []  # the state of `_Bare`

_TIMEOUTS: dict[str, Any] = {"soft_timeout": _WAIT_S, "hard_timeout": 2 * _WAIT_S}
if "hang" in PLAN["faults"]:
    _TIMEOUTS = {
        "soft_timeout": inprocess.Adaptive(floor=datetime.timedelta(seconds=0.1), warmup=4)
    }


class _Bare:
    """In place of a job: a round of all ranks, then another one, and a load of the state before."""

    restored_from = "live"

    def __init__(self, _: object, *, model: nn.Module, optimizer: Any, every: None) -> None:
        self._parts, self.steps = (model, optimizer), 0
        dist.barrier()

    def restore(self) -> None:
        dist.barrier()
        for part, state in zip(self._parts, _noted, strict=False):
            part.load_state_dict(state)
            self.steps = 1

    def step(self) -> None:
        self.steps += 1

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        _noted[:] = [part.state_dict() for part in self._parts]


@inprocess.Wrapper(repeated_faults=None, barrier_timeout=3 * _WAIT_S, **_TIMEOUTS)
def train(call: inprocess.CallWrapper) -> None:
    marks = [time.monotonic()]
    number: int = call.iteration
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    marks.append(time.monotonic())
    if not _kept or not PLAN["kept"]:
        model = model_of(PLAN["mib"])
        _kept[:] = [(model, torch.optim.Adam(model.parameters(), lr=1e-5, fused=True))]
    model, optimizer = _kept[0]
    inputs = torch.randn(_BATCH, next(model.parameters()).shape[1])
    marks.append(time.monotonic())
    kind: Any = _Bare if PLAN.get("bare") else outlast.Job
    with kind(FOLDER / "checkpoints", model=model, optimizer=optimizer, every=None) as job:
        marks.append(time.monotonic())
        job.restore()
        marks.append(time.monotonic())
        known = PLAN["kept"] and job.steps > 0
        ddp = DistributedDataParallel(model, init_sync=not known)
        marks.append(time.monotonic())
        for done in range(STEPS + 1):
            if done == STEPS and number < len(PLAN["faults"]):
                _wait(call, rank, number)
                if rank == _FAILING:
                    _fail(number, PLAN["faults"][number])
            call.ping()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            marks.append(time.monotonic())
            if done == STEPS - 1:
                source = job.restored_from
                say("iteration", rank=rank, iteration=number, marks=marks, source=source)


def _wait(call: inprocess.CallWrapper, rank: int, number: int) -> None:
    with call.long_phase(_WAIT_S):
        say("waiting", rank=rank, iteration=number)
        while not (FOLDER / f"go-{number}").exists():
            time.sleep(0.02)


def _fail(number: int, kind: str) -> None:
    if kind == "hang":
        say("fault", iteration=number)
        time.sleep(_WAIT_S)
    time.sleep(_SETTLE_S)  # the other ranks are in their collective
    say("fault", iteration=number)
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"planned fault {number}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
