"""Two ranks save step 2 with a metric, and a fault cuts it off: `python best_model.py PLAN`.

The plan is JSON: `path`; `plan`, the folder of the writers' plan, by which the file of rank 1 is
not finished until the test opens the gate; `rank`, `step` and `do` of the fault; `steps`; `lose`:
the ranks forget their snapshots before the restart; `log`: the job has a text file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_faults import RANK, say, wait_until
from torch import nn

sys.path.append(str(Path(__file__).parents[2]))

import outlast
from async_checkpoint.staged_writer import Plan
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"steps": 6, "lose": False, "log": False, **json.loads(sys.argv[1])}
STAGE = Plan(Path(PLAN["plan"])).use(pytest.MonkeyPatch())
MARK = Path(PLAN["plan"]) / "at gate"


def digest(model: nn.Module) -> float:
    return sum(each.detach().double().sum().item() for each in model.parameters())


def fail(job: outlast.Job) -> None:
    if PLAN["lose"]:
        for buffer in job.checkpointer.session.pool.all_buffers:
            buffer.snapshot = None
    if PLAN["rank"] != RANK:
        return
    wait_until(MARK.exists)
    if PLAN["do"] == "raise":
        raise RuntimeError("a planned fault")
    os.kill(os.getpid(), signal.SIGKILL)


def run(call: inprocess.CallWrapper) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with outlast.Job(PLAN["path"], model=model, optimizer=optimizer, every=None, keep=9) as job:
        if call.iteration and RANK == 0:
            STAGE.set()
        if PLAN["log"]:
            job.text_file(f"{PLAN['path']}.csv")
        say("begins", step=job.restore(), source=job.restored_from, iteration=call.iteration)
        for _ in job.epochs(1):
            for inputs in job.batches(
                [torch.full((1, 200), float(n)) for n in range(PLAN["steps"])]
            ):
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.step()
                say("trained", step=job.steps, digest=digest(model))
                if job.steps == 2 and not call.iteration:
                    rule = {"op": "finish", "name": "__1_0.distcp", "do": "wait"}
                    STAGE.set(rule)
                    dist.barrier()
                    job.save(metric=0.5)
                if job.steps == PLAN["step"] and not call.iteration:
                    fail(job)
                    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assignment = Compose(ShiftRanks(), AwaitReplacements(60))
    inprocess.Wrapper(rank_assignment=assignment)(run)()
    say("ended")
