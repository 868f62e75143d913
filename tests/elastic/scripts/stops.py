"""One rank of a wrapped training with stops and faults: `python stops.py PLAN`.

The plan is JSON; its `faults` are those of `planned_faults`. The points: `begin` (before the `Job`
exists), `restored`, `step N` (trained, before `job.step`), `agreed` (on the last step, before the
save for the stop), `saving N` (when the save of step N begins).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.async_checkpoint import Checkpointer
from outlast.elastic import ElasticLoader
from outlast.elastic.stop_signals import StopRequest
from outlast.inprocess.running_call import RunningCall

PLAN: dict[str, Any] = {
    "epochs": 2,
    "every": 3,
    "late": 0,
    "job": {},
    "timeouts": {},
    "faults": [],
}
PLAN.update(json.loads(sys.argv[1]))


def hang() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


reach = PlannedFaults(PLAN, {"hang": hang, "tell": lambda: say("told", pid=os.getpid())}).reach


def be_late() -> None:
    """The request reaches the store only once this iteration has been decided, or the call ends."""
    record, close, ends = RunningCall.request_stop, StopRequest.close, threading.Event()

    def later(self: RunningCall, reason: str, exit_code: int) -> None:
        wait_until(lambda: self.state.iteration >= PLAN["late"] or ends.is_set())
        record(self, reason, exit_code)

    def closing(self: StopRequest) -> None:
        ends.set()
        close(self)

    RunningCall.request_stop = later  # type: ignore[method-assign]
    StopRequest.close = closing  # type: ignore[method-assign]


def watch_saves() -> None:
    save: Any = Checkpointer.save

    def saving(self: Checkpointer, step: int, *args: Any, **options: Any) -> Any:
        handle = save(self, step, *args, **options)
        reach(f"saving {step}", int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        return handle

    def agreed(self: RunningCall, limit_s: float) -> None:
        reach("agreed", self.state.iteration)
        announce(self, limit_s)

    announce = RunningCall.saving_for_stop
    RunningCall.saving_for_stop = agreed  # type: ignore[method-assign]
    Checkpointer.save = saving  # type: ignore[method-assign]


TIMEOUTS = {name: datetime.timedelta(seconds=s) for name, s in PLAN["timeouts"].items()}


@inprocess.Wrapper(**TIMEOUTS)
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    say("entered", iteration=call.iteration, size=size, pid=os.getpid())
    reach("begin", call.iteration)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = ElasticLoader(dataset, global_batch_size=8, seed=3)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with outlast.Job(PLAN["path"], **parts, every=PLAN["every"], **PLAN["job"]) as job:
        say("restored", step=job.restore(), iteration=call.iteration, size=size)
        reach("restored", call.iteration)
        ddp = DistributedDataParallel(model)
        for _ in range(loader.epoch, PLAN["epochs"]):
            for inputs, targets in loader:
                call.ping()
                loss = nn.functional.mse_loss(ddp(inputs), targets)
                (loader.weight * loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                step = job.steps + 1
                say(
                    "trained",
                    step=step,
                    iteration=call.iteration,
                    size=size,
                    loss=loss.item().hex(),
                )
                reach(f"step {step}", call.iteration)
                job.step()
                if job.steps == 3:
                    job.checkpointer.wait()  # in every run, the save of this step is committed
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch_saves()
    if PLAN["late"]:
        be_late()
    say("ended", weights=train())
