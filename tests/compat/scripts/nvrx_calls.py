"""Wrapped calls with the defaults of nvidia-resiliency-ext 0.4, on one rank."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

from outlast import inprocess as seed
from outlast.compat.nvrx import inprocess


def fails_often() -> None:
    """Seven equal faults; six restarts, without a limit."""
    calls = []

    @inprocess.Wrapper()
    def train() -> int:
        calls.append(os.environ["RANK"])
        if len(calls) < 8:
            raise ValueError("a planned fault")
        return len(calls)

    assert train() == 8


def does_not_run() -> None:
    """The process is stopped until the hard timeout."""

    @inprocess.Wrapper(
        soft_timeout=timedelta(seconds=0.5),
        hard_timeout=timedelta(seconds=0.6),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
        progress_watchdog_interval=timedelta(seconds=0.1),
    )
    def train() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    train()


def returns_anything() -> None:
    """Policies with the calls of 0.2, whose results are no states: 0.4 does not use them."""
    called: list[str] = []

    class Policy(seed.initialize.Initialize, seed.finalize.Finalize, seed.health_check.HealthCheck):
        def __init__(self, *returned: Any) -> None:
            self.returned = list(returned)

        def __call__(self, *_: Any) -> Any:
            called.append(type(self.returned[0]).__name__)
            return self.returned.pop(0)

    @seed.Wrapper(
        initialize=Policy(None, "initialized"),
        finalize=Policy(("finalized", 1, 2)),
        health_check=Policy(True, 0.5, {"healthy": True}),
    )
    def train() -> int:
        if "tuple" not in called:
            raise ValueError("a planned fault")
        return len(called)

    assert train() == 6, called


if __name__ == "__main__":
    globals()[sys.argv[1]]()
