"""Functions that a fault on another rank interrupts in a data loader, and in a debugger."""

from __future__ import annotations

import datetime
import gc
import os
import threading
import time

import torch
from rank import main, say, scenario, wrapped
from rank_actions import SHORT, collective, finish, join_group, rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from outlast.inprocess import CallWrapper


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((1000,), float(index))


@scenario
@wrapped()
def loads(call: CallWrapper) -> int:
    """Rank 1 fails in the first three iterations, while the others load batches with workers."""
    join_group()
    for number, _ in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2)):
        call.ping()
        if number == 15:
            break
        if call.iteration < 3 and number == 5 + call.iteration and rank() == 1:
            raise OSError("a planned fault")
        collective()
    return finish()


class Stuck(Slow):
    """Its third batch waits for a lock that nobody releases, or takes its time."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8:
            lock = threading.Lock()
            lock.acquire()
            if self.iteration == 0:
                lock.acquire()
            for _ in range(120):
                time.sleep(0.1)
        return super().__getitem__(index)


@scenario
@wrapped(soft_timeout=datetime.timedelta(seconds=8), hard_timeout=datetime.timedelta(seconds=60))
def waits_for_a_worker(call: CallWrapper) -> int:
    """A wait for a worker outlasts the interval in which torch asks whether the worker lives."""
    join_group()
    if rank() == 0:
        loader = DataLoader(Stuck(call.iteration), batch_size=4, num_workers=2)
        for _, _ in zip(range(4), loader, strict=False):
            pass
    collective()
    return finish()


@scenario
@wrapped()
def forks(call: CallWrapper) -> int:
    """A child process collects the garbage that the failed iteration has left."""
    join_group()
    collective()
    if call.iteration == 0:
        gc.collect()
        gc.disable()  # until the fork, as it may happen to be
        garbage: list[object] = [DistributedDataParallel(nn.Linear(2, 2))]
        garbage.append(garbage)
        if rank() == 0:
            raise OSError("a planned fault")
        collective()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    gc.enable()
    _, status = os.waitpid(child, 0)
    say("child", status=status)
    return finish()


@scenario
@wrapped(**SHORT)
def is_debugged(call: CallWrapper) -> int:
    """Stays in the debugger for longer than all timeouts."""
    call.ping()
    answer = 41
    threading.Timer(4 * SHORT["hard_timeout"].total_seconds(), say, ["late"]).start()
    breakpoint()
    return answer


main()
