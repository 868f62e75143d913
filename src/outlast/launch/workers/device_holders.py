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
import signal
import subprocess

import psutil

DEVICE_FILES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri/render*", "/dev/davinci*", "/dev/accel*")
FREE_S = 30.0
"""For how long a replacement waits until the memory is free."""

_MEMORY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def kill_holders(pid: int) -> list[psutil.Process]:
    """Kills the processes in the group of an ended worker that have a file of a device open, and
    returns them. Call it before the worker is reaped: until then its number is its own.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid and _holds(process):
                process.send_signal(signal.SIGKILL)
                found.append(process)
    return found


class HeldMemory:
    """The memory of one dead worker, for as long as `holders` are there."""

    def __init__(self, holders: list[psutil.Process], now: float) -> None:
        self.since, self.is_told = now, False
        self._holders = holders
        self._answer: int | None = None
        self._said = ""  # so far

    @property
    def is_free(self) -> bool:
        self._holders = [each for each in self._holders if _is_there(each)]
        return not self._holders

    def ask(self) -> None:
        """Asks the driver of NVIDIA how much each process has, without a wait: that of a broken
        device may not answer.
        """
        if self._answer is None:
            self._answer, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            with open(end, "wb") as output, contextlib.suppress(OSError):  # it is not there
                asked = subprocess.Popen(
                    _MEMORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
                )
                asked.returncode = 0  # the launcher reaps it, and subprocess must not wait

    def held_by(self) -> str:
        """The processes in words; with the amounts, if the driver has answered."""
        if self._answer is not None:
            with contextlib.suppress(BlockingIOError):
                self._said += os.read(self._answer, 1 << 16).decode()
        rows = [row.split(", ") for row in self._said.splitlines()]
        amounts = {row[0]: f", {row[1]} MiB" for row in rows if len(row) == 2}
        found = []
        for each in self._holders:
            with contextlib.suppress(psutil.Error):
                found.append(f"process {each.pid} ({each.name()}{amounts.get(str(each.pid), '')})")
        return ", ".join(found)

    def close(self) -> None:
        if self._answer is not None:
            os.close(self._answer)


def _holds(process: psutil.Process) -> bool:
    try:
        names = [os.readlink(each.path) for each in os.scandir(f"/proc/{process.pid}/fd")]
    except OSError:
        return False  # it has ended, or is just closing them
    return any(fnmatch.fnmatch(name, each) for name in names for each in DEVICE_FILES)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        ended = process.status() == psutil.STATUS_ZOMBIE
        # The main thread may have ended before the others.
        return process.is_running() and not (ended and len(process.threads()) <= 1)
    return False
