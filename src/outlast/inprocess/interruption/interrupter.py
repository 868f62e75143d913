"""Interrupts the main thread: makes it leave the function, from any point, and nothing else.

There are two ways. *Signal*: SIGURG is sent to the thread, and its Python handler raises
`RankShouldRestart`. A signal also wakes blocking calls (`time.sleep`, `queue.get`, a socket read).
SIGURG is ignored by default, so a signal that arrives after the handler was restored does no harm.
*Asynchronous exception* (`PyThreadState_SetAsyncExc`), where the signal cannot be used because the
function does not run in the main thread, or the user has a handler for SIGURG. The exception is
raised at the next bytecode, so it does not wake a call that blocks in C.

Where may the interrupt be raised? In user code only.

* `run()` is the boundary. Python runs a signal handler in the main thread, between two bytecodes,
  and passes it the interrupted frame. While that frame is `run()` itself, the handler does not
  raise. So the lines of `run()` around the call need no protection, and there is no moment between
  "still inside the function" and "the exception is caught".
* Library code that the user calls (`atomic`) raises a *shield*, a counter that only this thread
  writes. Before the increment and after the decrement, no library state is half updated, so an
  interrupt there is equivalent to one in user code.
* An asynchronous exception is requested in one thread and raised in the other a little later. So
  when the function's thread enters a shield or leaves the function, it waits until no request is
  being made (`_busy`), and lets any request already made be raised before it continues.

In user code, it waits where it would do harm: see `deferral`.

User code may swallow the interrupt (`except BaseException`). Therefore the requester repeats it
until the thread has left the function, and logs where it was swallowed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.deferral import FINALIZER, SET_SIGNAL, Deferral, ask_again
from outlast.inprocess.interruption.error_kinds import (
    USER_REGION,
    ending_in,
    in_function,
    user_region,
)
from outlast.inprocess.interruption.release import QuietHooks
from outlast.inprocess.monitor.shared_page import Blocked
from outlast.system import devices
from outlast.system.frames import (
    frame_of,
    in_own_code,
    in_standard_library,
    is_installed,
    is_own,
    user_place_of,
)

INTERRUPT_SIGNAL = signal.SIGURG

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


# The packages in which a rank waits for other ranks: in a collective, in a backward pass that
# reduces gradients, or for a device that runs collectives. Elsewhere in torch (`torch.load`, a data
# loader), a rank does not depend on others.
_WAITING = (
    "torch.distributed",
    "torch.autograd",
    "torch.nn.parallel",
    "torch.accelerator",
    "outlast.system.streams",
)


_DEBUGGERS = ("bdb", "pdb")
_COMPILING = ("torch._dynamo", "torch._inductor", "triton")


class Interrupter:
    """Interrupts its creator's thread while that is in `run()`. `landed`: how many were raised."""

    def __init__(self) -> None:
        self.ident, self.native_id = threading.get_ident(), threading.get_native_id()
        self._pid = os.getpid()
        self.landed = 0
        self._shields = 0
        self._inside = self._wanted = self._busy = self._installed = False
        self._deferral = Deferral()
        self._previous: Any = None
        self._hooks = QuietHooks()

    # -- in the function's thread --------------------------------------------------------------

    def install(self) -> None:
        """Installs the hooks, and in the main thread the signal handler, unless there is one."""
        self._hooks.install()
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(INTERRUPT_SIGNAL)
        if previous in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = signal.signal(INTERRUPT_SIGNAL, self._handle)
            self._installed = True

    def restore(self) -> None:
        self._hooks.restore()
        if self._installed and signal.getsignal(INTERRUPT_SIGNAL) == self._handle:
            signal.signal(INTERRUPT_SIGNAL, self._previous)
        self._installed = False

    def run(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Calls `function`; returns its value, or the exception that it raised."""
        value: Any = None
        error: BaseException | None = None
        self._shields = 0  # a generator may have been closed while it held one
        self._wanted = False
        try:
            try:
                self._inside = True
                value = user_region(function)
            except BaseException as e:  # noqa: BLE001 - the caller handles every outcome
                error = ending_in(e)
            self._inside = False
            # No new request is made after this line. An earlier one is raised now, and dropped. It
            # cannot be canceled instead: setting no exception leaves the "eval breaker" flag of
            # CPython, up to 3.12, set forever, which slows down the whole program.
            self._let_requests_land()
        except RankShouldRestart as late:  # an asynchronous one, in the lines above
            if self._inside:
                error = late
            self._inside = False
        return value, error

    def shield(self) -> None:
        """Prevents interrupts in this thread until `unshield()`."""
        before = self._shields
        try:
            self._shields = before + 1
            if self._busy:
                self._let_requests_land()
        except BaseException:
            self._shields = before
            raise

    def unshield(self) -> None:
        if self._shields:  # 0 if a generator of an earlier iteration is closed only now
            self._shields -= 1

    # -- in the monitor thread -----------------------------------------------------------------

    @property
    def by_signal(self) -> bool:
        return self._installed and signal.getsignal(INTERRUPT_SIGNAL) == self._handle

    def request(self) -> str:
        """Interrupts the thread; returns how: `signal`, `async`, or `none` outside of user code."""
        if not self._inside:
            return "none"
        if not self._wanted:
            self._deferral.begin()
            self._wanted = True
        if self.by_signal:
            self._deferral.requested()
            signal.pthread_kill(self.ident, INTERRUPT_SIGNAL)
            return "signal"
        self._busy = True
        try:
            # Read again: while `_busy` is set, the thread cannot leave the function or enter a
            # shield without waiting for this request.
            if self._shields or not self._still_inside():
                return "none"
            if self._deferral.must_wait(self._frames(), in_handler=False):
                return "none"
            self._deferral.begin()
            _set_async_exc(self.ident, RankShouldRestart)
            self.landed += 1
            return "async"
        finally:
            self._busy = False

    def _still_inside(self) -> bool:
        return self._inside

    @property
    def deferred(self) -> bool:
        """Whether the last request has found the thread where the interrupt waits."""
        return self._deferral.waiting

    def _frames(self) -> list[FrameType]:
        return list(_stack(frame_of(self.ident)))

    def in_function(self) -> bool:
        """Whether the thread is in the function that `run` has called."""
        return in_function(frame_of(self.ident))

    def where(self) -> str:
        """The thread's frames outside this package, innermost first: `file:line function`."""
        return places_of((frame, frame.f_lineno) for frame in self._frames())

    def user_place(self) -> str:
        return user_place_of(frame_of(self.ident))

    def in_debugger(self) -> bool:
        return any(_is_in(frame, _DEBUGGERS) for frame in self._frames())

    def cleans_up(self) -> bool:
        """Whether the thread, left by an exception, is in a finalizer or in our own clean-up."""
        frame = frame_of(self.ident)
        return in_own_code(frame) or any(f.f_code.co_name == FINALIZER for f in _stack(frame))

    def waits_for_others(self) -> bool:
        """Whether the innermost Python frame of the thread is where torch waits for other ranks, or
        outside Python's library is one of this package, which waits for nothing else for long.
        """
        innermost = frame_of(self.ident)
        frame = _outside_library(innermost)
        return waits(innermost) or (frame is not None and is_own(frame, but=_OF_USERS))

    def blocked_in(self) -> Blocked:
        """Where the thread is, which runs no Python code at the moment."""
        innermost = frame_of(self.ident)
        frame = _outside_library(innermost)
        if waits(frame):
            return Blocked.COLLECTIVE if _is_in(frame, _WAITING[:1]) else Blocked.WAITS
        if frame is None or is_own(frame):  # this package waits for others, or copies state
            return Blocked.UNKNOWN
        if frame is not innermost or self._sleeps():
            return Blocked.ELSEWHERE
        # Any operation may wait for the device, which may wait for other ranks. That wait uses the
        # CPU, so CPU time says nothing.
        on_device = devices.in_use() is not None and not _is_in(frame, _COMPILING)
        return Blocked.WAITS if on_device else Blocked.UNKNOWN

    def _sleeps(self) -> bool:
        try:
            return "nanosleep" in Path(f"/proc/self/task/{self.native_id}/wchan").read_text()
        except OSError:
            return False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at_boundary = frame is not None and frame.f_code is _BOUNDARY
        if at_boundary or not self._wanted or not self._inside or self._shields:
            return
        if os.getpid() != self._pid:  # a child that `multiprocessing` has forked just now
            return
        frames = list(_stack(frame))
        if any(each.f_code is _HANDLER for each in frames):
            return  # a second signal in the handler, which decides for its own frame
        if not self._deferral.must_wait(frames, in_handler=True):
            self._deferral.begin()
            self.landed += 1
            raise RankShouldRestart("another rank failed, or the job changes its size")
        if self._deferral.must_ask_again():
            ask_again(SET_SIGNAL, signum)  # the last call

    def _let_requests_land(self) -> None:
        # In a forked child, no other thread exists to clear `_busy`.
        while self._busy and os.getpid() == self._pid:
            time.sleep(0)
        for _ in range(2):  # a pending exception is raised at the jump of a loop
            pass


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not USER_REGION:
        yield frame
        frame = frame.f_back


def _outside_library(frame: FrameType | None) -> FrameType | None:
    while frame is not None and in_standard_library(frame):
        frame = frame.f_back
    return frame


def _is_in(frame: FrameType | None, packages: tuple[str, ...]) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def waits(frame: FrameType | None) -> bool:
    """Whether it is a frame of torch in which a rank waits for other ranks."""
    accelerator = devices.current()
    own = () if accelerator is None else (accelerator.module.__name__,)  # such as torch.xpu
    return _is_in(frame, (*_WAITING, *own))


def places_of(stack: Iterable[tuple[FrameType, int]]) -> str:
    """The first frames of a stack and the user's first one, as `Interrupter.where` has them."""
    places: list[str] = []
    found = False
    for frame, line in stack:
        is_users = not is_installed(frame)
        if not is_own(frame) and (len(places) < 4 or (is_users and not found)):
            file = "/".join(frame.f_code.co_filename.split("/")[-2:])
            places.append(f"{file}:{line} {frame.f_code.co_name}")
            found = found or is_users
    return " < ".join(places)


_OF_USERS = ("chaos", "campaign")
"""Planned faults, and the training that they disturb, are as the user's code."""
_BOUNDARY: CodeType = Interrupter.run.__code__
_HANDLER: CodeType = Interrupter._handle.__code__


class AtomicSection:
    """The context manager behind `CallWrapper.atomic()`; reentrant, for one thread.

    A restart (abort and interrupt) begins only while the function's thread is outside all atomic
    sections. Once a restart is due, the thread cannot enter another section: it is interrupted at
    the entry. Both sides decide under one lock, so one always comes first. The function's thread
    takes that lock under a shield, so an interrupt can never leave it locked.
    """

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter
        self._changed = threading.Condition(threading.Lock())
        self._depth = 0
        self._terminating = False

    def __enter__(self) -> None:
        self.interrupter.shield()
        with self._changed:
            refused = self._terminating and not self._depth
            if not refused:
                self._depth += 1
        if refused:
            self.interrupter.unshield()
            raise RankShouldRestart("a restart has begun: atomic() is not entered")

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth = max(0, self._depth - 1)  # a generator may outlive its iteration
            self._changed.notify_all()
        self.interrupter.unshield()

    def begin_termination(self) -> None:
        """Waits until the thread is outside. From the start of this wait, the thread cannot enter
        again: otherwise a loop of atomic sections could delay the restart forever.
        """
        with self._changed:
            self._terminating = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._depth == 0)

    def await_termination(self) -> None:
        """Waits for `begin_termination`, in the function's thread, and raises `RankShouldRestart`.
        The thread may hold sections: they would delay the termination, but not its beginning.
        """
        self.interrupter.shield()
        with self._changed:
            self._changed.wait_for(lambda: self._terminating)
        self.interrupter.unshield()
        raise RankShouldRestart("a restart has begun")

    def function_left(self) -> None:
        """Call when the function has been left: a section held by a generator delays no restart."""
        with self._changed:
            self._depth = 0
            self._changed.notify_all()

    def reset(self) -> None:
        with self._changed:
            self._terminating = False
            self._depth = 0
