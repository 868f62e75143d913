"""A page of memory that the main process and its monitor process share.

Each field is an aligned 8-byte word with a single writer, so a reader sees the old value or the new
one, never a mixture. The monitor process writes `killed_hard` and `reported_soft`; the main process
writes all other fields. `outlast top` reads some of them (`outlast.metrics.progress_page`).
"""

from __future__ import annotations

import enum
import mmap
import os

from outlast.events.emitter import Place
from outlast.metrics import progress_page

NOTICE_AFTER_S = 10.0
"""A rank that has made no progress for so long is named, in one line."""


class Activity(enum.IntEnum):
    """The activity of the main process, as far as the timeouts are concerned."""

    WAITING = 0
    """In a wait inside the library, which has its own timeout; the hard timeout applies to the
    heartbeat thread then: see `ProgressTimeouts`.
    """
    USER = 1
    """In user code before the function: initialize, a health check."""
    FUNCTION = 2
    """In the function."""
    LEAVING = 3
    """Told to leave the function; the hard timeout runs until it has left. Also in `finalize` and
    the health check that follow, with a new hard timeout each.
    """
    DONE = 4
    """Has left the wrapper: the end of the process is not a fault."""


class Blocked(enum.IntEnum):
    """Where the function's thread is while it runs no Python code."""

    NO = 0
    """It runs Python code, or the heartbeat thread has not looked yet."""
    WAITS = 1
    """Where torch waits for other ranks, or for a device that does."""
    UNKNOWN = 2
    """In other C code: it may wait for others, or compute."""
    ELSEWHERE = 3
    """In the standard library, or asleep: nothing of torch will wake it."""
    COLLECTIVE = 4
    """In `torch.distributed`: as `WAITS`, and it computes nothing there."""


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
    """Progress, rank and activity of the main process."""

    activity = _Int(0)
    iteration = _Int(progress_page.ITERATION)
    member = _Int(2)
    rank = _Int(3)
    pings = _Int(progress_page.PINGS)
    killed_hard = _Int(5)
    thread_1 = _Int(7)  # IDs of two threads that live as long as the main process
    thread_2 = _Int(8)
    store_port = _Int(9)  # of the iteration's store if the main process serves it, else 0
    reported_soft = _Int(6)  # the iteration in which the soft timeout was last reported
    # The last training step of this iteration; 0 if none was reported.
    step = _Int(progress_page.STEP)
    function_thread = _Int(progress_page.FUNCTION_THREAD)  # the ID of the one that runs it
    blocked = _Int(12)
    world_size = _Int(13)
    # What `coordination.waits` says; other threads than the function's write the second.
    waits, works = _Int(14), _Int(15)
    # The time of the last progress (monotonic): a ping, or Python code was executed. And the soft
    # timeout in seconds; 0 means the soft timeout of the settings.
    progress = _Float(progress_page.PROGRESS)
    soft_limit = _Float(1)
    # The limit of a declared long phase: 0 outside such a phase, -1 in one without a limit.
    long_limit = _Float(2)
    heartbeat = _Float(3)  # when the heartbeat thread last ran (monotonic); 0: there is none
    pinged = _Float(4)  # the last ping or step, or else the entry into the function (monotonic)
    worked = _Float(5)
    # The longest time without progress that has ended since `pinged`, and when: `pause_since_ping`.
    pause, pause_ended = _Float(6), _Float(7)

    def __init__(self) -> None:
        # Some builds of Python lack `memfd_create`: `outlast top` then shows what the events say.
        create = getattr(os, "memfd_create", None)
        self._descriptor = -1 if create is None else create(progress_page.NAME)
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._map = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        mapped = memoryview(self._map)
        self.ints = mapped[: progress_page.FLOATS_AT].cast("q")
        self.floats = mapped[progress_page.FLOATS_AT : progress_page.SIZE].cast("d")
        mapped.release()
        self.iteration = self.member = self.rank = self.reported_soft = -1

    def publish(self, place: Place, now: float) -> None:
        """The place of the main process, which waits inside the library."""
        self.iteration, self.member = place.iteration, place.member
        self.rank, self.world_size = place.rank, place.world_size
        self.enter(Activity.WAITING, now)

    def enter(self, activity: Activity, now: float) -> None:
        """Begins an activity: its time without progress counts from `now`."""
        self.blocked, self.pinged = Blocked.NO, now
        # Before the activity: the monitor process must not judge it by an older time.
        self.progress = now
        self.activity = activity

    def begin_iteration(self) -> None:
        """Nothing of the iteration before counts in the next one."""
        self.pings = self.step = self.waits = 0
        self.soft_limit = self.long_limit = 0.0

    def enter_user_code(self, activity: Activity, now: float) -> None:
        """Begins an activity around the function, in which no pings have come yet."""
        self.pings = 0
        self.enter(activity, now)

    def note_progress(self, now: float) -> float:
        """Python code was executed; returns how long it was not."""
        pause = now - self.progress
        if pause > self.pause_since_ping():
            self.pause, self.pause_ended = pause, now
        self.progress = now
        return pause

    def pause_since_ping(self) -> float:
        """The longest time without progress that has ended since the last ping or step."""
        return self.pause if self.pause_ended > self.pinged else 0.0

    def close(self) -> None:
        self.ints.release()
        self.floats.release()
        self._map.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
