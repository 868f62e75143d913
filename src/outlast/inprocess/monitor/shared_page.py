"""A page of memory that the main process and its monitor process share.

The monitor process writes `killed_hard` and `reported_soft`; the main process writes all other
fields. `outlast top` reads some of them, and has their layout (`outlast.metrics.progress_page`).
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import weakref

from outlast.events.emitter import Place
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import Interruption
from outlast.metrics import progress_page

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

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


class SharedPage(progress_page.Page):
    """Progress, rank and activity of the main process."""

    activity: int
    iteration: int
    member: int
    rank: int
    world_size: int
    step: int  # the last training step of this iteration; 0 if none was reported
    pings: int  # in this iteration
    function_thread: int  # the ID of the one that runs the function
    thread_1: int  # IDs of two threads that live as long as the main process
    thread_2: int
    blocked: int
    waits: int  # what `coordination.waits` says; other threads than the function's write the second
    works: int
    store_port: int  # of the iteration's store if the main process serves it, else 0
    killed_hard: int
    reported_soft: int  # the iteration in which the soft timeout was last reported
    progress: float  # the last progress (monotonic): a ping, or Python code was executed
    soft_limit: float  # in seconds; 0 means the soft timeout of the settings
    long_limit: float  # of a declared long phase: 0 outside such a phase, -1 in one without a limit
    heartbeat: float  # when the heartbeat thread last ran (monotonic); 0: there is none
    pinged: float  # the last ping or step, or else the entry into the function (monotonic)
    worked: float  # when `works` has changed last (monotonic)
    pause: float  # the longest time without progress that has ended since `pinged`, and when it has
    pause_ended: float

    _descriptor = -1

    def __new__(cls) -> SharedPage:
        # Some builds of Python lack `memfd_create`: `outlast top` then shows what the events say.
        create = getattr(os, "memfd_create", None)
        descriptor = -1 if create is None else create(progress_page.NAME)
        flags = mmap.MAP_SHARED
        if descriptor >= 0:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        else:
            flags |= mmap.MAP_ANONYMOUS
        # Not `mmap.mmap`, which has a descriptor of its own: `close` would not hide the page.
        address = _libc.mmap(
            None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
        )
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "a page of shared memory cannot be mapped")
        page = cls.from_address(address)
        # As long as a thread has the page. At exit, threads may still run: the kernel unmaps it.
        weakref.finalize(page, _libc.munmap, address, mmap.PAGESIZE).atexit = False
        page._descriptor = descriptor
        page.iteration = page.member = page.rank = page.reported_soft = -1
        return page

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

    def fault(self, rank: int, host: str, pid: int, kind: Interruption, cause: str) -> FaultRecord:
        """A fault of the rank whose main process, `pid` on `host`, writes this page."""
        return FaultRecord(
            iteration=max(self.iteration, 0),
            member=self.member,
            rank=rank,
            host=host,
            pid=pid,
            interruption=kind.value,
            cause=cause,
            pings=self.pings,
            step=self.step,
            ran=max(0.0, self.progress - self.pinged),
        )

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
        """Nobody finds it by its name from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
