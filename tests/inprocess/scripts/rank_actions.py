"""Actions of the ranks in a scenario, and policies for their wrapper."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank import say

from outlast.inprocess.finalize import Finalize

FOREVER_S = 100_000.0


def rank() -> int:
    """The present rank."""
    return int(os.environ["RANK"])


def join_group() -> int:
    """Creates the process group, and checks that it works; returns the world size."""
    dist.init_process_group("gloo")
    return collective()


def collective() -> int:
    """An all-reduce; returns the number of ranks that took part."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return int(count)


def finish() -> int:
    """Ends the process group; returns this rank."""
    dist.barrier()
    dist.destroy_process_group()
    return rank()


def die() -> None:
    """Ends this process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_forever() -> None:
    """Blocks until it is interrupted."""
    threading.Event().wait(FOREVER_S)


def wait_until_asleep() -> None:
    """Waits until the main thread of this process sleeps in the kernel, and stays there."""
    status = Path(f"/proc/self/task/{os.getpid()}/status")
    before: list[str] = []
    while True:
        now = [x for x in status.read_text().splitlines() if x.startswith(("State", "voluntary"))]
        if now == before and now[0].split()[1] == "S":  # no switch since: the same sleep
            return
        before = now
        time.sleep(0.02)


class Told:
    """The test sends SIGUSR1 to let this rank continue, any number of times."""

    def __init__(self) -> None:
        self._event = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._event.set())

    def wait(self) -> None:
        self._event.wait()
        self._event.clear()


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# Limits that a hang reaches soon.
SHORT: dict[str, Any] = {
    "soft_timeout": seconds(1.5),
    "hard_timeout": seconds(2.5),
    "termination_grace_time": seconds(0.5),
    "monitor_thread_interval": seconds(0.5),
    "progress_watchdog_interval": seconds(0.5),
}


class Finalized(Finalize):
    """Reports that this rank has reached `finalize`."""

    def __call__(self, state, train_ex=None):
        say("finalized", iteration=state.iteration)
        return state, train_ex
