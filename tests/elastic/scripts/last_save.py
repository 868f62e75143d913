"""Trains three steps; then the disk of the checkpoints is full: `python last_save.py PLAN`.

The plan is JSON: `path`, the folder; `wrapped`; `frees`, whether rank 0 makes room when the last
save has failed once; `every` and `fallback` of the job; `limit_s`, how long the last save is tried;
`stop`, whether rank 1 gets SIGTERM in the last step; `grace` of the job.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import RANK, say
from torch import nn

import outlast
from outlast import inprocess
from outlast.elastic.job import ending

PLAN: dict[str, Any] = {
    **{"wrapped": True, "frees": False, "every": None, "fallback": None, "limit_s": 1, "stop": 0},
    **{"grace": 30},
    **json.loads(sys.argv[1]),
}
PATH = Path(PLAN["path"])
FILLER = PATH.parent / "filler"
STEPS = 3

ending.LIMIT_S = PLAN["limit_s"]


class MakesRoom(logging.Handler):
    """Makes room when the first failure of the last save is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if "the last save failed" in record.getMessage():
            FILLER.unlink()
            logging.getLogger("outlast.elastic").removeHandler(self)


def fill() -> None:
    if RANK == 0:
        with FILLER.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return


def run() -> int:
    if dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {name: PLAN[name] for name in ("every", "fallback", "grace")}
    with outlast.Job(PATH, model=model, optimizer=optimizer, **options) as job:
        say("begins", step=job.restore())
        while job.steps < STEPS or PLAN["stop"]:
            if job.steps == STEPS - 1:
                job.checkpointer.wait()
                dist.barrier()
                fill()
                dist.barrier()
                if PLAN["stop"] and RANK == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            job.step(samples=1)
            say("trained", step=job.steps)
    return job.steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    if PLAN["frees"] and RANK == 0:
        logging.getLogger("outlast.elastic").addHandler(MakesRoom())
    steps = inprocess.Wrapper()(run)() if PLAN["wrapped"] else run()
    say("ended", step=steps, pid=os.getpid())
