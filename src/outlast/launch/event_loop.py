"""The one place where the launcher waits: descriptors, signals and timers, in one thread.

Not asyncio: its child watchers reap by pid and know nothing of adopted orphans, it must not share
the wakeup descriptor, and all that is needed of it is what stands here.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

from outlast.clock import Clock, MonotonicClock

__all__ = ["Loop", "Timer"]


class Timer:
    """A call that is due later; `cancel` it if it is no longer wanted."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Make the call not happen."""
        self._callback = None

    def fire(self) -> None:
        """Make the call, unless it was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def pending(self) -> bool:
        """Whether the call is still to come."""
        return self._callback is not None


class Loop:
    """Waits for descriptors, signals and timers, and calls what was registered for them.

    A context manager: signal handlers and the wakeup descriptor are put back as they were.

    Args:
        signals: which to take. One that is ignored when the loop starts (`nohup`) stays so.
        on_signal: called for each, from the loop, never from within a handler.
        clock: measures the timers.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals],
        on_signal: Callable[[signal.Signals], None],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._wanted = tuple(signals)
        self._on_signal = on_signal
        self.clock: Clock = MonotonicClock() if clock is None else clock
        # poll, not epoll: stdout may be a regular file, which epoll refuses.
        self._selector = selectors.PollSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Loop:
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            receive, send = socket.socketpair()
            stack.callback(receive.close)
            stack.callback(send.close)
            for end in (receive, send):
                end.setblocking(False)
            before = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            for number in self._wanted:
                handler = signal.getsignal(number)
                if number != signal.SIGCHLD and handler is signal.SIG_IGN:
                    continue
                signal.signal(number, _nothing)
                stack.callback(signal.signal, number, handler or signal.SIG_DFL)
            self.watch(receive.fileno(), selectors.EVENT_READ, lambda: self._signalled(receive))
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is ready (`selectors.EVENT_READ` or `EVENT_WRITE`)."""
        self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop that; nothing happens if it was not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, in `seconds` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock.now() + seconds, next(self._order), timer))
        return timer

    def run_once(self) -> None:
        """Wait until there is something to do, and do it."""
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        timeout = None
        if self._timers:
            timeout = max(0.0, self._timers[0][0] - self.clock.now())
        for key, _ in self._selector.select(timeout):
            # A callback before this one may have ended the watch.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._timers and self._timers[0][0] <= self.clock.now():
            heapq.heappop(self._timers)[2].fire()

    def _signalled(self, receive: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while numbers := receive.recv(4096):
                # Each once, in the order of their coming: SIGCHLD says "at least one child", and
                # a second SIGINT within one turn of the loop was not meant as a second one.
                for number in dict.fromkeys(numbers):
                    if number in self._wanted:
                        self._on_signal(signal.Signals(number))


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python writes to the wakeup descriptor only for signals that have a handler."""
