"""Wrapped calls with the defaults of nvidia-resiliency-ext 0.4, on one rank."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

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


if __name__ == "__main__":
    {"fails_often": fails_often, "does_not_run": does_not_run}[sys.argv[1]]()
