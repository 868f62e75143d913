"""Getting the main thread out of the function, wherever it is, and nowhere else.

Two ways. *Signal*: SIGURG to the thread, whose Python handler raises `RankShouldRestart`. A signal
also wakes blocking calls (`time.sleep`, `queue.get`, a socket). SIGURG, because its default action
is to be ignored: one that is still on its way when the handler has been restored does no harm.
*Asynchronous exception* (`PyThreadState_SetAsyncExc`), where a signal cannot be used: the function
runs in another thread than the main one, or the user has a handler of his own for SIGURG. It lands
at the next bytecode, so it does not wake a call that blocks in C.

Where may it be raised? In user code only.

* `run()` is the boundary. Python runs a signal handler in the main thread, between two bytecodes,
  and hands it the frame that was interrupted. While that frame is the boundary's own, the handler
  does not raise; so the lines of `run()` around the call need no protection, and there is no
  moment between "still inside" and "caught".
* Library code that the user calls (`ping`, `atomic`) raises a *shield*, a counter that only this
  thread writes. Before the increment and after the decrement nothing of the library is half
  done, so an interrupt there is one in user code.
* With the asynchronous exception the requester decides, and the exception lands a little later.
  So both entering a shield and leaving the function wait until no request is being made (`_busy`)
  and then let one that is under way land before they go on.

User code may swallow the interrupt (`except BaseException`). The requester therefore repeats it
until the thread has left, and is told where it was swallowed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.fault_echo import ending_in

__all__ = ["INTERRUPT_SIGNAL", "Interrupter"]

INTERRUPT_SIGNAL = signal.SIGURG

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


# The packages of torch in which a rank waits for others: in a collective, in a backward pass that
# reduces gradients, for a device that runs collectives. Elsewhere (`torch.load`, a data loader) it
# is by itself.
_WAITING = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "torch.cuda")


class Interrupter:
    """Interrupts the thread that made this object, while it is in `run()`."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._pid = os.getpid()
        self.landed = 0
        self._shields = 0
        self._inside = False
        self._wanted = False
        self._busy = False
        self._previous: Any = None
        self._installed = False

    # -- the thread itself -------------------------------------------------------------------

    def install(self) -> None:
        """Takes the signal, if this is the main thread and nobody else has it."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(INTERRUPT_SIGNAL)
        if previous in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = signal.signal(INTERRUPT_SIGNAL, self._handle)
            self._installed = True

    def restore(self) -> None:
        """Gives the signal back, unless the user has taken it meanwhile."""
        if self._installed and signal.getsignal(INTERRUPT_SIGNAL) == self._handle:
            signal.signal(INTERRUPT_SIGNAL, self._previous)
        self._installed = False

    def run(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Calls `function`; returns its value, or the exception that it ended with."""
        value: Any = None
        error: BaseException | None = None
        self._shields = 0  # a generator may have died with one raised
        self._wanted = False
        try:
            try:
                self._inside = True
                value = _user_region(function)
            except BaseException as e:  # noqa: BLE001 - every ending is the caller's to judge
                error = ending_in(e)
            self._inside = False
            # No new request is made from here on. One that is under way lands now, and is dropped.
            # It is not taken back: to set no exception leaves CPython, up to 3.12, with its "there
            # is something to do" flag up for good, which slows down all of the program.
            self._let_requests_land()
        except RankShouldRestart as late:  # an asynchronous one, in the lines above
            if self._inside:
                error = late
            self._inside = False
        return value, error

    def shield(self) -> None:
        """From here on no interrupt is raised in this thread, until `unshield()`."""
        before = self._shields
        try:
            self._shields = before + 1
            if self._busy:
                self._let_requests_land()
        except BaseException:
            self._shields = before
            raise

    def unshield(self) -> None:
        if self._shields:  # none, if a generator of an earlier iteration ends only now
            self._shields -= 1

    # -- the requester's thread --------------------------------------------------------------

    @property
    def by_signal(self) -> bool:
        """Whether the signal is ours to use."""
        return self._installed and signal.getsignal(INTERRUPT_SIGNAL) == self._handle

    def request(self) -> str:
        """Asks the thread to leave the function; returns how: `signal`, `async`, or `none` if it
        is not in user code at this moment.
        """
        if not self._inside:
            return "none"
        self._wanted = True
        if self.by_signal:
            signal.pthread_kill(self.ident, INTERRUPT_SIGNAL)
            return "signal"
        self._busy = True
        try:
            # Read again: from here on the thread does not leave or enter a shield unseen.
            if self._shields or not self._still_inside():
                return "none"
            if _importing(sys._current_frames().get(self.ident)):
                return "none"
            _set_async_exc(self.ident, RankShouldRestart)
            self.landed += 1
            return "async"
        finally:
            self._busy = False

    def _still_inside(self) -> bool:
        return self._inside

    def where(self) -> str:
        """The place the thread is in, innermost first, as `file:line function`."""
        frame = sys._current_frames().get(self.ident)
        places: list[str] = []
        while frame is not None and frame.f_code is not _REGION and len(places) < 4:
            file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
            places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return " < ".join(places)

    def waits_for_others(self) -> bool:
        """Whether the innermost Python frame of the thread is where torch waits for other ranks."""
        frame = sys._current_frames().get(self.ident)
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        return any(f"{name}.".startswith(f"{package}.") for package in _WAITING)

    # -- parts -------------------------------------------------------------------------------

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at_boundary = frame is not None and frame.f_code is _BOUNDARY
        if at_boundary or not self._wanted or not self._inside or self._shields:
            return
        if not _importing(frame):
            self.landed += 1
            raise RankShouldRestart("another rank failed, or the job changes its size")

    def _let_requests_land(self) -> None:
        while self._busy and os.getpid() == self._pid:  # in a forked child nobody would end it
            time.sleep(0)
        for _ in range(2):  # a loop's jump is a point where a pending exception is raised
            pass


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way. An interrupt there would leave modules behind that are half
    made: Python forgets the module, but not its submodules, and many packages, torch's among them,
    cannot be imported a second time. The request is repeated, so it lands after the import.
    """
    while frame is not None and frame.f_code is not _REGION:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _user_region(function: Callable[[], Any]) -> Any:
    """A frame of its own for the user's side of the boundary: `function` may be written in C, and
    then the innermost Python frame while it runs is this one, not the boundary's.
    """
    return function()


_BOUNDARY: CodeType = Interrupter.run.__code__
_REGION: CodeType = _user_region.__code__
