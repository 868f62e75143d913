"""A page of memory that the main process and its monitor process share.

Each field is one aligned 8-byte word with one writer, so that a reader sees the old value or the
new one, never a mixture. The main process writes all fields but `killed_hard` and `reported_soft`.
"""

from __future__ import annotations

import enum
import mmap

__all__ = ["Activity", "SharedPage"]


class Activity(enum.IntEnum):
    """What the main process is at, as far as the timeouts are concerned."""

    WAITING = 0
    """In a wait of the library, which has a timeout of its own."""
    USER = 1
    """In user code around the function: initialize, finalize, a health check."""
    FUNCTION = 2
    """In the function."""
    LEAVING = 3
    """Told to leave the function; time runs until it has."""
    DONE = 4
    """Out of the wrapper: the end of the process is no fault any more."""


class _Int:
    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, page: SharedPage, owner: type[SharedPage]) -> int:
        return int(page.ints[self.index])

    def __set__(self, page: SharedPage, value: int) -> None:
        page.ints[self.index] = int(value)


class _Float:
    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, page: SharedPage, owner: type[SharedPage]) -> float:
        return float(page.floats[self.index])

    def __set__(self, page: SharedPage, value: float) -> None:
        page.floats[self.index] = value


class SharedPage:
    """Progress, place and activity of the main process."""

    activity = _Int(0)
    iteration = _Int(1)
    member = _Int(2)
    rank = _Int(3)
    pings = _Int(4)
    killed_hard = _Int(5)
    thread_1 = _Int(7)  # ids of two threads of the main process that live as long as it does
    thread_2 = _Int(8)
    store_port = _Int(9)  # where the iteration's store is served, if this process does; else 0
    reported_soft = _Int(6)  # the iteration in which the soft timeout was last reported
    # Monotonic seconds of the last progress, and how long without progress is still healthy;
    # a limit of 0 stands for the soft timeout of the settings.
    progress = _Float(0)
    soft_limit = _Float(1)
    # Of a declared long phase: 0 outside one, -1 in one without a limit of its own.
    long_limit = _Float(2)

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        whole = memoryview(self._map)
        self.ints = whole[:256].cast("q")
        self.floats = whole[256:512].cast("d")
        whole.release()
        self.iteration = self.member = self.rank = self.reported_soft = -1

    def close(self) -> None:
        self.ints.release()
        self.floats.release()
        self._map.close()
