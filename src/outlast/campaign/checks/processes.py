"""The processes of a round: found by a mark in their environment, also in sessions of their own."""

from __future__ import annotations

import contextlib
import time

import psutil

from outlast.campaign.environment import MARK


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with this mark."""
    found = []
    for process in psutil.process_iter():
        # It has ended, or is another user's.
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap_orphans(mark: str, linger_s: float) -> list[str]:
    """Waits `linger_s` for the processes to end; describes and kills those that do not."""
    deadline = time.monotonic() + linger_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
    described = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            described.append(f"process {process.pid}, {process.status()}: {_command(process)}")
            process.kill()
    psutil.wait_procs(left, timeout=linger_s)
    return described


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error as error:
        return type(error).__name__
