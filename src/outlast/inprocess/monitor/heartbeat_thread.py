"""The heartbeat thread: takes progress timestamps, and detects the end of the monitor process.

Progress means that the interpreter executes bytecode, other than to ask whether the workers of a
`DataLoader` live (`LoaderWorkers`). In the main thread, a pending call (`Py_AddPendingCall`), which
runs between two bytecodes, writes the timestamp. A thread that hangs in C, with or without the GIL,
runs no pending calls. For any other thread, the stack is examined: the same frame at the same
instruction means no progress. Where a thread without progress is blocked, is noted too (`Blocked`).

The end of the monitor process is an event: the kernel closes its end of a socket.
"""

from __future__ import annotations

import ctypes
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from outlast.clock import Clock
from outlast.coordination.training_step import loop
from outlast.inprocess.monitor.loader_workers import LoaderWorkers
from outlast.inprocess.monitor.shared_page import Activity, Blocked, SharedPage
from outlast.system.frames import frame_of

_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (_PendingCall, ctypes.c_void_p)
_add_pending_call.restype = ctypes.c_int

_LOOK_S = 0.1

_TIMED = (Activity.USER, Activity.FUNCTION)


class HeartbeatThread:
    """Watches the thread that creates it.

    It calls `on_monitor_end` once, when the monitor process at the other end of the socket
    `monitor` has ended; `blocked_in`, to note where the watched thread is while it runs no Python
    code; `every_interval`, once every `interval` seconds; and `look`, ten times a second.
    """

    def __init__(
        self,
        page: SharedPage,
        clock: Clock,
        interval: float,
        monitor: socket.socket,
        on_monitor_end: Callable[[], None],
        blocked_in: Callable[[], Blocked] = lambda: Blocked.UNKNOWN,
        every_interval: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._page, self._clock, self._interval, self._monitor = page, clock, interval, monitor
        self._on_monitor_end, self._every_interval = on_monitor_end, every_interval
        self._blocked_in, self._look = blocked_in, look
        self._watched = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._outstanding = False
        self._position: tuple[int, int] = (0, 0)
        self._loader = LoaderWorkers()
        # The interpreter keeps only the address: the object must live as long as the thread.
        self._pending = _PendingCall(self._in_main_thread)
        page.heartbeat = clock.now()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="outlast-heartbeat", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        return self._thread.native_id or 0

    def close(self) -> None:
        self._stop.send(b"x")
        self._thread.join()
        self._page.heartbeat = 0.0
        self._stop.close()
        self._stopped.close()
        # A pending call that has not run yet would call into a freed object.
        while self._outstanding and self._is_main:
            pass  # pending calls run at a loop's backward jump: takes a few rounds at most

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._stopped, select.POLLIN)
        poll.register(self._monitor, select.POLLIN)
        due = time.monotonic() + self._interval
        while True:
            pause_s = max(0.0, min(due - time.monotonic(), _LOOK_S))
            ready = [fd for fd, _ in poll.poll(pause_s * 1000)]
            if self._stopped.fileno() in ready:
                return
            if self._monitor.fileno() in ready:
                poll.unregister(self._monitor)
                self._on_monitor_end()
            self._look()
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._interval
            self._page.heartbeat = self._clock.now()
            self._take_timestamp()
            self._every_interval()

    def _take_timestamp(self) -> None:
        if self._page.activity not in _TIMED:
            return
        if self._is_main:
            if self._outstanding:
                self._page.blocked = self._blocked_in()
            else:
                self._outstanding = True
                if _add_pending_call(self._pending, None) != 0:
                    self._outstanding = False  # the queue is full: the next interval tries again
            return
        frame = frame_of(self._watched)
        position = (id(frame), -1 if frame is None else frame.f_lasti)
        if position == self._position:
            self._page.blocked = self._blocked_in()
            return
        self._position = position
        self._note_progress()

    def _in_main_thread(self, argument: int | None) -> int:
        self._outstanding = False
        if self._page.activity not in _TIMED:
            return 0
        if self._loader.are_quiet(sys._getframe(1)):
            self._page.blocked = Blocked.ELSEWHERE
        else:
            self._note_progress()
        return 0

    def _note_progress(self) -> None:
        pause = self._page.note_progress(self._clock.now())
        if self._page.blocked == Blocked.COLLECTIVE:
            loop.note_wait(pause)
        self._page.blocked = Blocked.NO
