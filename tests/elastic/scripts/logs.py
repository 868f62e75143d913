"""One rank of a wrapped training that writes a log, keeps what is best, and sums over an epoch:
`python logs.py PLAN`.

The plan is JSON: `path` of the checkpoints, `log` of the rows, `faults` (see `planned_faults`).
`rows`: written by rank 0 alone "before" `job.step`, or given to all ranks "after" it. `best`:
updated in step 3 on all ranks ("same"), or on rank 0 alone ("rank 0"), there also with `per_rank`
("own"). `sums`: whether a loss is added "before" its backward pass, or "after" it. The points of
step N: `forward N`, `stepped N` (before `job.step`), `done N`.
"""

from __future__ import annotations

import csv
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import outlast
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {
    "rows": "before",
    "sums": "after",
    "best": "same",
    "every": 4,
    "job": {},
    "faults": [],
}
PLAN.update(json.loads(sys.argv[1]))
reach = PlannedFaults(PLAN, {}).reach


class Value:
    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(PLAN.get("wait", 60))))
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(6.0).reshape(6, 1) / 6 + rank
    loader = DataLoader(TensorDataset(x, 2 * x))
    best, total = Value(float("inf")), Value(0.0)
    states: dict[str, Any] = {"total": outlast.per_rank(total)}
    states["best"] = outlast.per_rank(best) if PLAN["best"] == "own" else best
    given = {"model": model, "optimizer": optimizer, "states": states, **PLAN["job"]}
    with outlast.Job(PLAN["path"], **given, every=PLAN["every"]) as job:
        log = job.text_file(PLAN["log"])
        rows = csv.writer(log)
        step = job.restore()
        say("restored", step=step, source=job.restored_from, best=best.value)
        if log.tell() == 0:
            rows.writerow(["step", "total"])
        for _ in job.epochs(2):
            if job.steps == job.epoch_start:
                total.value = 0.0
            for inputs, targets in job.batches(loader):
                call.ping()
                step = job.steps + 1
                if step == 5:  # in every run, the save of step 4 is committed
                    job.checkpointer.wait()
                reach(f"forward {step}", call.iteration)
                loss = nn.functional.mse_loss(model(inputs), targets)
                if PLAN["sums"] == "before":  # the rank's own state is known in the backward pass
                    total.value += loss.item()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if PLAN["sums"] == "after":
                    total.value += loss.item()
                if step == 3 and (rank == 0 or PLAN["best"] == "same"):
                    best.value = 1.25
                if PLAN["rows"] == "before" and rank == 0:
                    rows.writerow([step, total.value.hex()])
                reach(f"stepped {step}", call.iteration)
                job.step()
                if PLAN["rows"] == "after":
                    rows.writerow([step, total.value.hex()])
                reach(f"done {step}", call.iteration)
            say("epoch", total=total.value.hex())
    say("ended", best=best.value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
