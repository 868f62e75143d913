"""Processes that keep a dead worker's memory on a device: killed at once, and waited for.

A device gives memory back when the last process has closed the file that it belongs to; one that
ends has no file open some time before that is done. The workers of a `DataLoader` inherit the files
of the devices by fork, and outlive their rank until they look for it, which one in a long call into
C does late. The replacement has the same device, and would run out of memory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os

import psutil

DEVICE_FILES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri/render*", "/dev/davinci*", "/dev/accel*")
FREE_S = 30.0
"""For how long a replacement waits until the memory is free."""


def holds_device(process: psutil.Process) -> bool:
    """Whether it has a file of a device open."""
    try:
        names = [os.readlink(each.path) for each in os.scandir(f"/proc/{process.pid}/fd")]
    except OSError:
        return False  # it has ended, or is just closing them
    return any(fnmatch.fnmatch(name, each) for name in names for each in DEVICE_FILES)


class HeldMemory:
    """The memory of one dead worker, for as long as `holders` are there."""

    def __init__(self, holders: list[psutil.Process], now: float) -> None:
        self.since, self.is_told = now, False
        self._holders = holders

    @property
    def is_free(self) -> bool:
        self._holders = [each for each in self._holders if _is_there(each)]
        return not self._holders

    def held_by(self) -> str:
        """The processes in words."""
        found = []
        for each in self._holders:
            with contextlib.suppress(psutil.Error):
                found.append(f"process {each.pid} ({each.name()})")
        return ", ".join(found)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        ended = process.status() == psutil.STATUS_ZOMBIE
        # The main thread may have ended before the others.
        return process.is_running() and not (ended and len(process.threads()) <= 1)
    return False
