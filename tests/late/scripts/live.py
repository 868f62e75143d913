"""One rank of a wrapped training on the device `late`: `python live.py PLAN`, as `elastic/scripts`.

All ranks compute the same gradients. In place of their all-reduce, the stream is held until all
ranks have come. An abort does to the gradients what it does to those of a collective of NCCL: it
leaves garbage, and lets the stream go on. The points of step N: `forward N`, `computed N` (before
the ranks meet), `stepped N` (before `job.step`), `done N`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "elastic/scripts"))

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn

import outlast
from late import device
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.abort import Abort, AbortTorchDistributed
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks
from outlast.inprocess.state import State

PLAN: dict[str, Any] = {"steps": 8, "every": 100, "optimizer": {}, "faults": []}
PLAN.update(json.loads(sys.argv[1]))
LATE = device.use()
reach = PlannedFaults(PLAN, {}).reach


class Meeting:
    """Holds the current stream until all ranks have come, or an abort ends it."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._gradients = gradients
        self._over = threading.Lock()
        self._gate: Any = LATE.hold(0, LATE.current_stream(0))
        threading.Thread(target=self._meet, daemon=True).start()

    def _meet(self) -> None:
        try:
            dist.barrier()
        except (RuntimeError, ValueError):  # the abort of gloo, or the group is gone
            self.abort()
        else:
            self._release()

    def _release(self) -> None:
        with self._over:
            gate, self._gate = self._gate, None
            if gate is not None:
                gate.release()

    def abort(self) -> None:
        with self._over:
            if self._gate is None:
                return
        stream = torch.Stream("late")
        with stream:
            for gradient in self._gradients:
                gradient.fill_(1e9)
        stream.synchronize()
        self._release()


MEETING: list[Meeting] = []


class AbortMeeting(Abort):
    def __call__(self, state: State) -> State:
        for meeting in MEETING:
            meeting.abort()
        return state


@inprocess.Wrapper(
    rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)),
    abort=Compose(AbortTorchDistributed(), AbortMeeting()),
)
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    MEETING.clear()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).to("late")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **PLAN["optimizer"])
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    with outlast.Job(PLAN["path"], model=model, optimizer=optimizer, every=PLAN["every"]) as job:
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration)
        while job.steps < PLAN["steps"]:
            call.ping()
            step = job.steps + 1
            reach(f"forward {step}", call.iteration)
            optimizer.zero_grad()
            loss = model((x * step).to("late")).square().mean()
            loss.backward()
            reach(f"computed {step}", call.iteration)
            MEETING[:] = [Meeting([p.grad for p in model.parameters() if p.grad is not None])]
            optimizer.step()
            reach(f"stepped {step}", call.iteration)
            job.step()
            say("trained", step=step, loss=loss.item().hex())
            reach(f"done {step}", call.iteration)
        content = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        say("ended", state=hashlib.sha256(content).hexdigest())
        dist.barrier()
    dist.destroy_process_group()


train()
