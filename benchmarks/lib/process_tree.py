"""Ends everything that a benchmark has started, orphans included."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import psutil

__all__ = ["adopt_orphans", "die_with_parent", "end_descendants"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """From now on, orphans such as monitors of killed ranks become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The signal that this process gets if its parent is killed; called in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def end_descendants() -> None:
    """Kills and reaps all children of this process, theirs, and orphans of these."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
    time.sleep(0.01)
