"""The thread that takes progress timestamps by itself, and sees the monitor process die.

Until the function pings, "the interpreter gets on" counts as progress: in the main thread a
pending call (`Py_AddPendingCall`) that runs between two bytecodes writes the time. A thread that
hangs in C, with the GIL or without it, runs no pending call. Of another thread than the main one
the stack is looked at: the same frame at the same instruction is no progress.

The end of the monitor process is an event: it closes its end of a socket.
"""

from __future__ import annotations

import ctypes
import select
import socket
import sys
import threading
from collections.abc import Callable

from outlast.clock import Clock
from outlast.inprocess.progress.shared_page import Activity, SharedPage

__all__ = ["Watchdog"]

_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (_PendingCall, ctypes.c_void_p)
_add_pending_call.restype = ctypes.c_int

_WATCHED = (Activity.USER, Activity.FUNCTION)


class Watchdog:
    """Watches the thread that makes it.

    Args:
        page: where timestamps go.
        clock: that takes them.
        interval: between two timestamps, in seconds.
        monitor: the socket to the monitor process.
        monitor_lost: called once, in the watchdog's thread, when the monitor process has ended.
        each: called in every interval, in the watchdog's thread.
    """

    def __init__(
        self,
        page: SharedPage,
        clock: Clock,
        interval: float,
        monitor: socket.socket,
        monitor_lost: Callable[[], None],
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._page = page
        self._clock = clock
        self._interval = interval
        self._monitor = monitor
        self._monitor_lost = monitor_lost
        self._each = each
        self._watched = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._outstanding = False
        self._position: tuple[int, int] = (0, 0)
        # The interpreter keeps the address only: the object must live as long as the thread.
        self._pending = _PendingCall(self._in_main_thread)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="outlast-watchdog", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The system's id of the thread."""
        return self._thread.native_id or 0

    def close(self) -> None:
        """Ends the thread."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self._woken.close()
        # A pending call that has not run yet would come back to a dead object.
        while self._outstanding and self._is_main:
            pass  # a loop's jump is where pending calls are run: at most a few rounds

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._monitor, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(self._interval * 1000)]
            if self._woken.fileno() in ready:
                return
            if self._monitor.fileno() in ready:
                poll.unregister(self._monitor)
                self._monitor_lost()
            self._look()
            self._each()

    def _look(self) -> None:
        if self._page.activity not in _WATCHED or self._page.pings:
            return
        if self._is_main:
            if not self._outstanding:
                self._outstanding = True
                if _add_pending_call(self._pending, None) != 0:
                    self._outstanding = False  # the queue is full: the next interval tries again
            return
        frame = sys._current_frames().get(self._watched)
        position = (id(frame), -1 if frame is None else frame.f_lasti)
        if position != self._position:
            self._position = position
            self._page.progress = self._clock.now()

    def _in_main_thread(self, argument: int | None) -> int:
        self._outstanding = False
        if self._page.activity in _WATCHED and not self._page.pings:
            self._page.progress = self._clock.now()
        return 0
