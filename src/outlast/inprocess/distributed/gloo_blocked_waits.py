"""Wakes threads that gloo has forgotten: those that still wait when all connections are gone.

Shutting down the connections (see `distributed/gloo_sockets.py`) ends nearly every wait. Two are
left over, seen on torch 2.13, and would last for the group's timeout, 30 minutes by default:

* a send whose bytes were not all written. `Pair::signalException` tells the buffers of receives
  and of sends that have not begun, but not those of the sends in its transmission queue;
* the wait for a peer to connect, while the group is made: it has no connection yet.

What a thread waits for, Linux shows in `/proc/self/task/<tid>/syscall`: the address of the futex,
and the stack pointer. A return address into `UnboundBuffer::waitSend`, say, close to the latter
proves that the thread is in a wait of gloo; threads that have nothing to do wait as well, on their
group. The futex is part of a condition variable, which is part of the gloo object: so the object
begins a few words below, where its run-time type name stands. Then a function of that object ends
the wait: `UnboundBuffer::abortWaitSend` and `abortWaitRecv`, `Pair::signalExceptionExternal`.

A thread is woken only when nothing else will wake it, so that the object stays alive while it is
told. That is so when gloo's event loop has closed every connection, which it does as it tells the
waiting buffers (the connections are then gone from its epoll instance), and the thread was in the
same wait at two looks since, without a context switch in between. Where connections are left,
longer patience stands in for that event.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import time
from pathlib import Path
from typing import Any

from outlast.inprocess.distributed.gloo_sockets import type_name

__all__ = ["ForgottenWaits"]

SETTLED_PATIENCE_S = 0.003
PATIENCE_S = 0.04
_TASKS = Path("/proc/self/task")
_FUTEX = {"x86_64": b"202", "aarch64": b"98"}.get(os.uname().machine, b"none")
_BUFFER = b"N4gloo9transport3tcp13UnboundBufferE"
_PAIR = b"N4gloo9transport3tcp4PairE"
_REACH = 1024
"""How far from its beginning an object's condition variable may lie, in bytes."""
_STACK = 2048
"""How far from the stack pointer the frame of a function of gloo may lie, in bytes."""
_CODE = 0x300
"""How long these functions are, in bytes."""
_MILLISECONDS = "EPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_WAITS_IN = {
    f"_ZN4gloo9transport3tcp13UnboundBuffer8waitSend{_MILLISECONDS}": _BUFFER,
    f"_ZN4gloo9transport3tcp13UnboundBuffer8waitRecv{_MILLISECONDS}": _BUFFER,
    "_ZN4gloo9transport3tcp4Pair18waitUntilConnectedERSt11unique_lockISt5mutexEb": _PAIR,
}

# The string of the C++ library, short enough to stand in itself: pointer, length, 16 characters.
_TEXT = b"aborted"
_Wait = tuple[int, int, bytes, int]


class ForgottenWaits:
    """Remembers who waits from one look to the next."""

    def __init__(self) -> None:
        self._since: dict[_Wait, float] = {}
        self._settled_at = 0.0

    def waiting(self) -> bool:
        """Whether any thread waits on an object of gloo now, in vain or not."""
        return bool(_waits())

    def wake(self, settled: bool) -> int:
        """Looks once, and wakes every thread that waits in vain; returns how many.

        To be called again and again when the connections were shut down.

        Args:
            settled: no connection was left at this look.
        """
        now, woken = time.monotonic(), 0
        self._since = {wait: self._since.get(wait, now) for wait in _waits()}
        self._settled_at = (self._settled_at or now) if settled else 0.0
        for wait, since in self._since.items():
            quiet = settled and now - max(since, self._settled_at) >= SETTLED_PATIENCE_S
            if (quiet or now - since >= PATIENCE_S) and wait in _waits():
                woken += _wake(wait[2], wait[3])
        return woken


def _waits() -> set[_Wait]:
    """Who waits on which object: thread, its count of context switches, type and address."""
    found = set()
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tid in os.listdir(_TASKS):
            try:
                fields = (_TASKS / tid / "syscall").read_bytes().split()
                status = (_TASKS / tid / "status").read_bytes()
            except OSError:
                continue  # it has ended, or this system does not tell
            if len(fields) == 9 and fields[0] == _FUTEX:
                held = _holder(memory, int(fields[1], 16), int(fields[7], 16))
                if held is not None:
                    switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
                    found.add((int(tid), switches, *held))
    finally:
        os.close(memory)
    return found


def _holder(memory: int, futex: int, stack: int) -> tuple[bytes, int] | None:
    """The gloo object that the futex is a part of."""
    wanted = _type_waited_for(memory, stack)
    if wanted is None:
        return None
    start = futex & ~7
    words = _words(memory, start - _REACH, _REACH + 8)
    low, high = _library()
    for index in range(len(words) - 1, -1, -1):
        if low <= words[index] < high:  # may be a vtable
            address = start - 8 * (len(words) - 1 - index)
            if type_name(memory, address) == wanted:
                # A base class may have a vtable of its own, which says where the whole begins.
                (to_top,) = struct.unpack("=q", os.pread(memory, 8, words[index] - 16))
                return wanted, address + to_top
    return None


def _type_waited_for(memory: int, stack: int) -> bytes | None:
    ranges = _code()
    for word in _words(memory, stack, _STACK):
        for begin, name in ranges:
            if begin <= word < begin + _CODE:
                return name
    return None


def _words(memory: int, address: int, size: int) -> tuple[int, ...]:
    try:
        window = os.pread(memory, size, address)
    except (OSError, OverflowError):
        return ()  # its lower end lies outside of what is mapped
    return struct.unpack(f"={len(window) // 8}Q", window[: len(window) // 8 * 8])


@functools.cache
def _code() -> tuple[tuple[int, bytes], ...]:
    """Where the functions begin in which a thread may wait, and on what they wait."""
    found = []
    for symbol, name in _WAITS_IN.items():
        function = _function(symbol)
        address = ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
        if address:
            found.append((address, name))
    return tuple(found)


@functools.cache
def _library() -> tuple[int, int]:
    """Where torch's library, which gloo is a part of, lies in memory."""
    bounds = [
        int(bound, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libtorch_cpu" in line
        for bound in line.partition(" ")[0].split("-")
    ]
    return (min(bounds), max(bounds)) if bounds else (0, 0)


def _wake(name: bytes, address: int) -> bool:
    if name == _BUFFER:
        calls = [
            _function("_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitSendEv"),
            _function("_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitRecvEv"),
        ]
        for call in calls:
            if call is not None:
                call(ctypes.c_void_p(address))
        return None not in calls
    signal = _function(
        "_ZN4gloo9transport3tcp4Pair23signalExceptionExternalERKNSt7__cxx1112basic_string"
        "IcSt11char_traitsIcESaIcEEE"
    )
    if signal is None:
        return False
    text = ctypes.create_string_buffer(bytes(16) + _TEXT, 32)
    words = ctypes.cast(text, ctypes.POINTER(ctypes.c_size_t))
    words[0], words[1] = ctypes.addressof(text) + 16, len(_TEXT)
    result = ctypes.c_void_p()  # a std::exception_ptr, which is not needed
    signal(ctypes.byref(result), ctypes.c_void_p(address), text)
    return True


@functools.cache
def _function(symbol: str) -> Any:
    """A function of the gloo that torch brings along; it is found among what is loaded."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(library)), symbol)
    except (OSError, AttributeError):
        return None
    function.restype = None
    return function
