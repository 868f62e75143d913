"""Where the interrupt waits: in code that would keep a lock, or a structure half updated.

`with lock:` is safe in itself. CPython looks for signals after calls, at jumps backwards and at the
entry of a function, and not between `__enter__` and the block, or the block and `__exit__`. But an
`__enter__` or `__exit__` in Python has such points of its own: in `threading.Condition`, which
`queue.Queue` uses, after the lock was acquired and before it is released. `logging` acquires its
locks before a `try`. `async with` calls `__aexit__`, and has the point before it awaits the result.
So while the innermost frames are in such modules, a context manager is being entered or left, or a
coroutine was made and is awaited next, the interrupt waits until the thread has moved on:

* *Running code.* The handler asks Python to call it again at the next point (`ask_again`), so the
  interrupt comes at the first point of the user's code, after microseconds. That slows the
  thread down, so it ends after `_DENSE_S` of its CPU time; from then on the handler is called once
  a request.
* *A blocked call.* The handler runs inside a call such as `lock.acquire()`, which returns only if
  the handler raises. That code is written for an exception here, as of Ctrl-C: the lock was not
  acquired. Right after the call it has been. Python shows the same frame and instruction, but a
  blocked call meets only requests, while after its return Python calls the handler again without
  one. So the thread is blocked if requests, and nothing else, have met it in one place for
  `_BLOCKED_S`, and once more after that: on a busy machine the call may have returned before the
  last of them, and the thread not have run since; then the next call finds it in another place.
* *Neither within `_PATIENCE_S`*: a loop in C over such functions. The interrupt comes anyway. If
  the thread got less than `_USED_S` of CPU time meanwhile, its machine is busy: ten times as late.

An asynchronous exception is raised after the blocked call, so it waits for the code to move on.
"""

from __future__ import annotations

import ctypes
import dis
import inspect
import threading
import time
from collections.abc import Sequence
from types import FrameType

from outlast.system.frames import in_standard_library

_PACKAGES = (
    "threading",
    "queue",
    "logging",
    "multiprocessing",
    "concurrent.futures",
    "asyncio",
    "contextlib",
    "importlib",
    "tqdm",
)
_MANAGERS = ("__enter__", "__exit__", "__aenter__", "__aexit__")
_SHIELDED = "outlast.inprocess.interruption.interrupter"
_IMPORT = "<frozen importlib._bootstrap>"
FINALIZER = "__del__"
_AWAITS, _CACHE = dis.opmap["GET_AWAITABLE"], dis.opmap.get("CACHE", -1)
_BLOCKED_S = 0.01
_DENSE_S = 0.1
_PATIENCE_S, _USED_S = 1.0, 0.3


# `ask_again(SET_SIGNAL, number)` has Python call the handler of the signal once more. After a call,
# Python looks for signals, and then makes pending calls. So a signal that the handler set directly
# would be looked at in the handler's own frame, and used up there. As a pending call, it is set
# after that; and this must be the handler's last call, so no such point follows in the handler.
ask_again = ctypes.pythonapi["Py_AddPendingCall"]  # not the shared attribute: with its own types
ask_again.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
ask_again.restype = ctypes.c_int
SET_SIGNAL = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)


class Deferral:
    """Decides whether an interrupt must wait. One thread requests, and this one is interrupted.
    `waiting`: the last request has found the thread in critical code.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._clock, self._used = time.pthread_getcpuclockid(threading.get_ident()), 0.0
        self._begun = self._arrived = 0.0
        self._requests = self._answered = 0
        self._place, self._is_long = (0, 0), False

    def begin(self) -> None:
        """Call at the first request, and when an interrupt has been raised."""
        self._begun, self._place, self.waiting = time.monotonic(), (0, 0), False
        self._used = time.clock_gettime(self._clock)

    def requested(self) -> None:
        """Call before each signal."""
        self._requests += 1

    def must_wait(self, frames: Sequence[FrameType], *, in_handler: bool) -> bool:
        """Whether the interrupt must wait, with the thread in these frames, innermost first."""
        waited, used = time.monotonic() - self._begun, time.clock_gettime(self._clock) - self._used
        patient = waited < _PATIENCE_S * (1 if used >= _USED_S else 10)
        # An import left half-way has no second chance: Python removes the module, but not its
        # submodules, and many packages, such as torch, cannot be imported twice. It has no limit.
        if any(each.f_code.co_filename == _IMPORT for each in frames):
            self.waiting = True
        # Python drops what a finalizer raises, such as that of a data loader, which ends its
        # workers. One that does not end in time is interrupted: it may block.
        elif any(each.f_code.co_name == FINALIZER for each in frames):
            self.waiting = waited < _PATIENCE_S
        elif patient and _is_critical(frames):
            self.waiting = not (in_handler and self._is_blocked(frames[0]))
        else:
            self.waiting = False
        return self.waiting

    def must_ask_again(self) -> bool:
        """Whether the handler, which waits, shall be called again at the next point."""
        requested = self._requests != self._answered
        self._answered = self._requests
        return requested or time.clock_gettime(self._clock) - self._used < _DENSE_S

    def _is_blocked(self, frame: FrameType) -> bool:
        now = time.monotonic()
        place = id(frame), frame.f_lasti  # a number: a reference would keep what the frame has
        if place != self._place or self._requests == self._answered:
            self._place, self._arrived, self._is_long = place, now, False
        was_long, self._is_long = self._is_long, now - self._arrived >= _BLOCKED_S
        return was_long


def _is_critical(frames: Sequence[FrameType]) -> bool:
    """Whether the innermost frames are in such a module, or any enters or exits a context."""
    inner = True
    if frames and frames[0].f_code.co_flags & inspect.CO_COROUTINE and _awaits_next(frames[0]):
        return True
    for each in frames:
        module = str(each.f_globals.get("__name__", ""))
        if each.f_code.co_name in _MANAGERS and module != _SHIELDED:
            return True
        if inner:
            if any(f"{module}.".startswith(f"{package}.") for package in _PACKAGES):
                return True
            inner = in_standard_library(each)
    return False


def _awaits_next(frame: FrameType) -> bool:
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and code[at] == _CACHE:
        at += 2
    return at < len(code) and code[at] == _AWAITS
