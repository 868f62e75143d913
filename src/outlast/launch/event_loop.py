"""The only place where the launcher waits: for descriptors, signals and timers. The agent has one
loop in its main thread; a service in another thread has a loop without signals.

It does not use asyncio, whose child watchers reap by pid and ignore adopted orphans, and which
claims the wakeup descriptor; besides, only the few functions below are needed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable

from outlast.clock import Clock, MonotonicClock


class Timer:
    """A scheduled call; by default none."""

    def __init__(self, callback: Callable[[], object] | None = None) -> None:
        self._callback = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def pending(self) -> bool:
        """Whether the call has been neither made nor canceled."""
        return self._callback is not None


class EventLoop:
    """Waits for descriptors, signals and timers, and makes the calls registered for them.

    A context manager: the exit restores signal handlers and the wakeup descriptor.

    Args:
        signals: the signals to handle, which requires the main thread. One that is ignored at the
            start (`nohup`) stays ignored.
        on_signal: called for each signal, from the loop, never from a signal handler.
        clock: the clock of the timers.
        selector: the default is poll, not epoll: stdout may be a regular file, which epoll refuses.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals] = (),
        on_signal: Callable[[signal.Signals], None] = lambda number: None,
        *,
        clock: Clock | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._wanted = tuple(signals)
        self._on_signal = on_signal
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self._selector = selectors.PollSelector() if selector is None else selector
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._from_threads: deque[Callable[[], object]] = deque()
        self._wakeup: socket.socket | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> EventLoop:
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            receive, send = socket.socketpair()
            stack.callback(receive.close)
            stack.callback(send.close)
            for end in (receive, send):
                end.setblocking(False)
            if self._wanted:
                before = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
                stack.callback(signal.set_wakeup_fd, before)
            for number in self._wanted:
                handler = signal.getsignal(number)
                if number != signal.SIGCHLD and handler is signal.SIG_IGN:
                    continue
                # Python writes to the wakeup descriptor only for signals that have a handler.
                signal.signal(number, lambda *_: None)
                stack.callback(signal.signal, number, handler or signal.SIG_DFL)
            if self._wanted:
                # The parent may have left signals blocked, which the workers would inherit, too.
                mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            self.watch(receive.fileno(), selectors.EVENT_READ, lambda: self._on_wakeup(receive))
            self._wakeup = send
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def watch(self, fd: int, events: int, callback: Callable[[], object]) -> None:
        """Call `callback` whenever `fd` is ready (`selectors.EVENT_READ` or `EVENT_WRITE`)."""
        self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; no effect if it is not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock.now() + seconds, next(self._order), timer))
        return timer

    def call_from_thread(self, callback: Callable[[], object]) -> None:
        """Make a call from the loop soon; any thread may ask. No effect once the loop is closed."""
        self._from_threads.append(callback)
        # Full means that a wakeup is due anyway. The append comes first: a loop that has read the
        # byte finds the call.
        with contextlib.suppress(OSError):
            if self._wakeup is not None:
                self._wakeup.send(b"\0")

    def run_once(self) -> None:
        """Wait for the next descriptor, signal or timer, and make the calls."""
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        wait_s = max(0.0, self._timers[0][0] - self.clock.now()) if self._timers else None
        for key, _ in self._selector.select(wait_s):
            # An earlier callback may have stopped the watch.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._timers and self._timers[0][0] <= self.clock.now():
            heapq.heappop(self._timers)[2].fire()

    def _on_wakeup(self, receive: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while numbers := receive.recv(4096):
                # Each once, in order of arrival: SIGCHLD means "at least one child", and two
                # SIGINTs within one iteration of the loop count as one.
                for number in dict.fromkeys(numbers):
                    if number in self._wanted:
                        self._on_signal(signal.Signals(number))
        for _ in range(len(self._from_threads)):
            self._from_threads.popleft()()
