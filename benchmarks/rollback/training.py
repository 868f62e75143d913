"""A training under `outlast run` whose rank 1 fails once in each iteration, at the same point.

The harness gives a folder in `ROLLBACK_FOLDER`, with the plan in `plan.json`. Each iteration makes
two steps, saves a checkpoint, waits until it is committed, makes three more steps, and fails at the
beginning of the next one, while rank 0 waits in its collective. Before that, rank 1 waits for the
harness (a standby must be ready), and drops the checkpoint from the page cache if it is to be read
cold. To restore from disk, each rank gives up the checkpoint that it has in memory first.

Each process appends to `said.log`, one JSON object a line. Times are monotonic, and so comparable
between the processes of this host.
"""

from __future__ import annotations

import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.checkpoint.limits import drop_cache
from benchmarks.rollback.script import FOLDER, model_of, say
from benchmarks.rollback.ways import SAVED, UNSAVED, WAYS, Way
from outlast import inprocess
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointRestored

_FAILING = 1
_BATCH = 8
_SETTLE_S = 0.3


def main() -> None:
    torch.set_num_threads(1)
    train()


# The ranks wait for a standby before a fault, which takes long on a busy machine: that is no hang.
@inprocess.Wrapper(repeated_faults=None, soft_timeout=300, hard_timeout=330, barrier_timeout=360)
def train(call: inprocess.CallWrapper) -> None:
    plan = json.loads((FOLDER / "plan.json").read_text())
    way: Way = WAYS[plan["way"]]
    number: int = call.iteration
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = model_of(plan["mib"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    inputs = torch.randn(_BATCH, next(model.parameters()).shape[1])
    sink = MemorySink()
    with outlast.Job(
        FOLDER / "checkpoints",
        model=model,
        optimizer=optimizer,
        every=None,
        live=way.live,
        events=sink,
    ) as job:
        if way.from_disk:
            _give_up_memory(job)
        began = time.monotonic()
        job.restore()
        _say_restored(rank, number, job, began, sink)
        ddp = DistributedDataParallel(model)
        for done in range(SAVED + UNSAVED + 1):
            if done == SAVED:
                job.save().wait()
            if done == SAVED + UNSAVED and rank == _FAILING and number < len(plan["faults"]):
                _fail(number, way, plan["faults"][number])
            call.ping()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            say("step", rank=rank, iteration=number, step=job.steps)


def _say_restored(rank: int, number: int, job: outlast.Job, began: float, sink: MemorySink) -> None:
    found = [event for event in sink.events if isinstance(event, CheckpointRestored)]
    size = sum(p.nbytes for p in job.model.parameters()) * 3
    received = found[-1].fetched_bytes if found else 0
    say(
        "restored",
        rank=rank,
        iteration=number,
        step=job.steps,
        source=job.restored_from,
        began=began,
        moved_bytes=received if job.restored_from in ("live", "replica") else size,
        size_bytes=size,
    )


def _give_up_memory(job: outlast.Job) -> None:
    pool = job.checkpointer.session.pool
    for buffer in [*pool.buffers, *pool.handed_over]:
        buffer.snapshot = None


def _fail(number: int, way: Way, kind: str) -> None:
    say("waiting", iteration=number, kind=kind)
    while not (FOLDER / f"go-{number}").exists():
        time.sleep(0.05)
    if way.cold:
        drop_cache([path for path in (FOLDER / "checkpoints").rglob("*") if path.is_file()])
    time.sleep(_SETTLE_S)  # the other rank is in its collective; what was started has ended
    say("fault", iteration=number, kind=kind)
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"planned fault {number}")


if __name__ == "__main__":
    main()
