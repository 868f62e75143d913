"""The page of memory in which a rank keeps its progress, as another process of its user reads it.

A rank in a wrapped function writes its progress (pings, step, time) to a page that it shares with
its monitor process. The page has a name (`memfd_create`), so that `/proc/PID/fd` shows it. Reading
it costs the rank nothing, and it is as new as the last ping, where the event log has a record every
ten seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

NAME = "outlast-progress"
"""The name of the page, in every process."""


_INTEGERS = (
    "activity iteration member rank world_size step pings function_thread thread_1 thread_2 "
    "blocked waits works store_port killed_hard reported_soft"
)
_FLOATS = "progress soft_limit long_limit heartbeat pinged worked pause pause_ended"


class Page(ctypes.Structure):
    """The words of the page, of 8 bytes each: `outlast.inprocess.monitor.shared_page` writes them,
    and says what they are. Each has a single writer, so a reader sees the old value or the new one,
    never a mixture.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS.split()),
        *((name, ctypes.c_double) for name in _FLOATS.split()),
    )


@dataclass(frozen=True)
class Progress:
    """The progress of a rank."""

    iteration: int
    pings: int  # in this iteration
    step: int  # the last training step; 0 if none was reported
    progress: float  # when the rank last made progress (monotonic); 0 if it has not yet
    at: float  # when this was read (monotonic)
    # the CPU time of the thread that runs the function, in seconds; 0 if it is not known
    cpu: float = 0.0


def read_progress(pid: int) -> Progress | None:
    """The progress of a process on this host; `None` if it has no such page, has ended, or belongs
    to another user.
    """
    folder = f"/proc/{pid}/fd"
    found = None
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or not filled yet
                path = f"{folder}/{name}"
                if os.readlink(path).startswith(f"/memfd:{NAME}"):
                    page = _read(path, pid)
                    # A call of a wrapped function within another one has its own.
                    if found is None or page.progress > found.progress:
                        found = page
    return found


def _read(path: str, pid: int) -> Progress:
    page = Page.from_buffer_copy(Path(path).read_bytes())
    cpu = 0.0
    with contextlib.suppress(OSError):  # a kernel without it
        schedule = Path(f"/proc/{pid}/task/{page.function_thread}/schedstat").read_text()
        cpu = int(schedule.split()[0]) / 1e9
    numbers = page.iteration, page.pings, page.step
    return Progress(*numbers, page.progress, time.monotonic(), cpu)
