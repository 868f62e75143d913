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
import subprocess

import psutil

DEVICE_FILES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri/render*", "/dev/davinci*", "/dev/accel*")
FREE_S = 30.0
"""For how long a replacement waits until the memory is free."""

_MEMORY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


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
        self._answer: int | None = None  # a file

    @property
    def is_free(self) -> bool:
        self._holders = [each for each in self._holders if _is_there(each)]
        return not self._holders

    def ask(self) -> None:
        """Asks the driver of NVIDIA how much each process has, without a wait: that of a broken
        device may not answer.
        """
        if self._answer is None:
            self._answer, null = os.memfd_create("outlast-device-memory"), subprocess.DEVNULL
            with contextlib.suppress(OSError):  # it is not there
                asked = subprocess.Popen(_MEMORY, stdin=null, stdout=self._answer, stderr=null)
                asked.returncode = 0  # the launcher reaps it, and subprocess must not wait

    def held_by(self) -> str:
        """The processes in words; with the amounts, if the driver has answered."""
        answer = b"" if self._answer is None else os.pread(self._answer, 1 << 16, 0)
        rows = [row.split(", ") for row in answer.decode().splitlines()]
        amounts = {row[0]: f", {row[1]} MiB" for row in rows if len(row) == 2}
        found = []
        for each in self._holders:
            with contextlib.suppress(psutil.Error):
                found.append(f"process {each.pid} ({each.name()}{amounts.get(str(each.pid), '')})")
        return ", ".join(found)

    def close(self) -> None:
        if self._answer is not None:
            os.close(self._answer)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        ended = process.status() == psutil.STATUS_ZOMBIE
        # The main thread may have ended before the others.
        return process.is_running() and not (ended and len(process.threads()) <= 1)
    return False
