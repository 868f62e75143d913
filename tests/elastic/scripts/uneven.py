"""Two ranks that do not make the same steps; or do, and one of them is slow: `uneven.py PLAN`.

The plan is JSON: `path`, the folder; `how` the ranks differ (`batches`, `iterable`, `loop`: without
`Job.batches`, `saves`: rank 0 alone calls `job.save`, at the end of the body or of an epoch,
`skips`: rank 1 leaves out a batch, `forgets` to call `restore`, `phase`: it
waits for rank 0 in a collective of another group, in a long phase; `woken`: as `batches`, and
rank 0 is sampled while it handles the end of its connection; `swallows`: as `skips`, and rank 0
leaves out the batch of that error, and is sampled when it has left its loop); `joined`, whether
inside of DDP's `join()`; `every` and `overlap` of the job; `checks`; `wrapped`; `soft`, the soft
timeout; `slow`, the method of a save, and the rank on which it takes three times as long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import RANK, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import outlast
from outlast import inprocess
from outlast.async_checkpoint.save.save import Save
from outlast.inprocess.interruption import monitor_thread
from outlast.inprocess.interruption.monitor_thread import sample_stack
from outlast.inprocess.running_call import long_phase

PLAN: dict[str, Any] = {
    **{"how": "", "joined": False, "every": None, "overlap": True, "wrapped": True, "soft": 3.0},
    **{"slow": None, "checks": False},
    **json.loads(sys.argv[1]),
}
HOW, EPOCHS = PLAN["how"], 2
BATCHES = 4 if HOW in ("batches", "iterable", "loop", "woken") and RANK == 1 else 5


SKIPPED = ["batch"] if HOW in ("skips", "swallows") else []


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(BATCHES, 4))


def slowly(method: str) -> None:
    do = getattr(Save, method)

    def slow(save: Save) -> Any:
        if save.step:
            time.sleep(3 * PLAN["soft"])
        return do(save)

    setattr(Save, method, slow)


class Skipped(Exception):
    pass


woken, sampled = threading.Event(), threading.Event()


def sample_later(*args: Any) -> Any:
    """Once the connection of this rank is broken, and before it has left the function."""
    woken.wait()
    try:
        return sample_stack(*args)
    finally:
        sampled.set()


def reduce(tensor: Any) -> None:
    try:
        dist.all_reduce(tensor)
    except RuntimeError:
        if HOW == "swallows":
            raise Skipped from None
        woken.set()
        if HOW == "woken":
            sampled.wait()
        raise


def train() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    side = dist.new_group()
    torch.manual_seed(0)
    model = nn.Linear(4, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model) if PLAN["joined"] else None
    loader: Any = DataLoader(Stream() if HOW == "iterable" else torch.ones(BATCHES, 4))
    checks = [outlast.ReplicaCheck(every=1)] if PLAN["checks"] else []
    options: dict[str, Any] = {name: PLAN[name] for name in ("path", "every", "overlap")}
    with outlast.Job(**options, model=model, optimizer=optimizer, checks=checks) as job:
        say("begins", step=0 if HOW == "forgets" and RANK == 1 else job.restore())
        for _ in job.epochs(EPOCHS):
            with contextlib.nullcontext() if ddp is None else ddp.join():
                for batch in loader if HOW == "loop" else job.batches(loader):
                    if HOW == "phase" and RANK == 1 and job.steps == 2:
                        with long_phase(None):
                            dist.barrier(side)
                    if SKIPPED and RANK == 1 and job.steps == 2:
                        SKIPPED.clear()  # once
                        continue
                    optimizer.zero_grad()
                    (model if ddp is None else ddp)(batch).sum().backward()
                    try:
                        for parameter in model.parameters() if ddp is None else ():
                            reduce(parameter.grad)
                    except Skipped:
                        continue
                    optimizer.step()
                    job.step(samples=1)
                    if HOW == "saves" and RANK == 0 and job.steps == 3:
                        job.save(metric=1.0)
            if HOW == "saves at the end" and RANK == 0:
                job.save(metric=1.0)
        woken.set()
    say("trained", step=job.steps)
    return job.steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    if PLAN["slow"] and PLAN["slow"][1] == RANK:
        slowly(PLAN["slow"][0])
    if HOW in ("woken", "swallows") and RANK == 0:
        monitor_thread.sample_stack = sample_later
    if PLAN["wrapped"]:
        soft = PLAN["soft"]
        inprocess.Wrapper(
            soft_timeout=soft,
            hard_timeout=soft + 20,
            monitor_process_interval=0.2,
            progress_watchdog_interval=0.2,
            monitor_thread_interval=0.2,
        )(train)()
    else:
        train()
