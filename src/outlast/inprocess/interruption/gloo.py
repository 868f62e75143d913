"""Ends in-flight gloo collectives, and wakes threads that remain blocked in gloo afterwards.

Gloo has no working abort: the backend's `abort()` and `shutdown()` return at once, and the
collective continues until its timeout, 30 minutes by default (observed with torch 2.13). However,
after `shutdown(2)` on the connected sockets of gloo's pairs, nearly every blocked operation raises
within a millisecond. Two kinds of waits remain:

* a send whose bytes were not all written. `Pair::signalException` notifies the buffers of receives
  and of sends that have not started, but not those of the sends in its transmission queue;
* the wait for a peer to connect while the group is created: there is no connection yet.

Linux shows what a thread waits for in `/proc/self/task/<tid>/syscall`: the address of the futex,
and the stack pointer. A return address into `UnboundBuffer::waitSend`, for example, near the stack
pointer proves that the thread waits in gloo; idle threads also wait, but on their group. The futex
is part of a condition variable, which is part of the gloo object, so the object begins a few words
below the futex, at the word that leads to its run-time type name. A method of that object then
ends the wait: `UnboundBuffer::abortWaitSend` and `abortWaitRecv`, `Pair::signalExceptionExternal`.

A thread is woken only if nothing else will wake it, so that the object is alive during the call.
This is the case once gloo's event loop has closed every connection, which it does when it notifies
the waiting buffers (the connections are then gone from its epoll instance), and two later checks
find the thread in the same wait, without a context switch in between. Where connections remain,
waiting longer replaces the first condition. A method may end the wait, and the thread then destroys
the object: before each call the thread is found in the same wait once more.

All this depends on how torch was built. So the symbols and the layout of the objects are checked
once, before the first use. Where a build does not fit, the threads in that wait are not woken, and
one warning says that it may last for the timeout of its group. On aarch64,
`signalExceptionExternal` is not called: it returns a large object, whose address belongs in
register x8, which ctypes cannot set. There the wait for a peer to connect is left to the timeouts.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from outlast.system.sockets import RESTARTED, epoll_descriptors, shut_down, socket_inode

log = logging.getLogger("outlast.inprocess")

SETTLED_PATIENCE_S = 0.003
PATIENCE_S = 0.04
_TASKS = "/proc/self/task"
_FUTEX = ({"x86_64": b"202", "aarch64": b"98"}.get(os.uname().machine, b"none"), RESTARTED)
_ABORTS_SEND = "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitSendEv"
_ABORTS_RECV = "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitRecvEv"
_NEW_STRING = bool(torch._C._GLIBCXX_USE_CXX11_ABI)  # the builds of torch 2.6 on PyPI have the old
_SIGNALS = "_ZN4gloo9transport3tcp4Pair23signalExceptionExternalERK" + (
    "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" if _NEW_STRING else "Ss"
)
_BUFFER = b"N4gloo9transport3tcp13UnboundBufferE"
_PAIR = b"N4gloo9transport3tcp4PairE"
_REACH = 1024
"""The largest offset of the condition variable in an object, in bytes."""
_STACK = 2048
"""The largest distance of a gloo function's frame from the stack pointer, in bytes."""
_CODE = 0x300
"""The length of these functions, in bytes."""
_MILLISECONDS = "EPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_WAITS_IN = {
    f"_ZN4gloo9transport3tcp13UnboundBuffer8waitSend{_MILLISECONDS}": _BUFFER,
    f"_ZN4gloo9transport3tcp13UnboundBuffer8waitRecv{_MILLISECONDS}": _BUFFER,
}
_CALLS: dict[bytes, tuple[str, ...]] = {_BUFFER: (_ABORTS_SEND, _ABORTS_RECV)}
if os.uname().machine == "x86_64":
    _WAITS_IN["_ZN4gloo9transport3tcp4Pair18waitUntilConnectedERSt11unique_lockISt5mutexEb"] = _PAIR
    _CALLS[_PAIR] = (_SIGNALS,)

_TEXT = b"aborted"
_Wait = tuple[int, int, bytes, int]
_EVENT = re.compile(rb"^tfd:\s+(\d+) events:\s+[0-9a-f]+ data:\s+([0-9a-f]+)", re.MULTILINE)


def pair_sockets() -> dict[int, int]:
    """The sockets of gloo's connected pairs in this process: inode by descriptor.

    Gloo's event loop reveals them. Each of its connections is registered in an epoll instance
    together with a pointer to the C++ object that handles it, and Linux shows both in
    `/proc/self/fdinfo/<epoll fd>` (`tfd` and `data`, see proc_pid_fdinfo(5)). Memory is read
    through `/proc/self/mem`, where an invalid address is an error and not a crash, so event loops
    that keep something else in `data` (libuv and Python keep the descriptor) are skipped. Listening
    sockets have another type and are left alone: shutting one down calls std::terminate.
    """
    found: dict[int, int] = {}
    memory = -1
    try:
        for epoll in epoll_descriptors():
            for descriptor, data in _EVENT.findall(_read(f"/proc/self/fdinfo/{epoll}")):
                address = int(data, 16)
                if address < 1 << 16:
                    continue  # a descriptor, not a pointer
                if memory < 0:
                    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
                if _is_pair(memory, address):
                    inode = socket_inode(int(descriptor))
                    if inode is not None:
                        found[int(descriptor)] = inode
    finally:
        if memory >= 0:
            os.close(memory)
    return found


def type_name(memory: int, address: int) -> bytes:
    """The run-time type name of the C++ object at `address`; empty if there is none.

    By the Itanium C++ ABI, the first word of the object points to its vtable, the word before the
    vtable to the type_info, whose second word points to the name. `address` may be any number;
    `memory` is an open `/proc/self/mem`.
    """
    try:
        vtable = _word(memory, address)
        type_info = _word(memory, vtable - 8)
        name = _word(memory, type_info + 8)
        return os.pread(memory, 80, name).partition(b"\0")[0]
    except (OSError, OverflowError, struct.error):
        return b""


_pair_tables: set[int] = set()
"""The vtables of gloo's pairs, as far as they have been met: torch is never unloaded."""


def _is_pair(memory: int, address: int) -> bool:
    try:
        table = _word(memory, address)
    except (OSError, OverflowError, struct.error):
        return False
    if table in _pair_tables:
        return True
    name = type_name(memory, address)
    if name.startswith(b"N4gloo9transport3tcp") and b"Pair" in name:
        _pair_tables.add(table)
        return True
    return False


def _read(path: str) -> bytes:
    """A file of `/proc`; empty if what it describes is gone, or the system does not show it."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _word(memory: int, address: int) -> int:
    return int(struct.unpack("=Q", os.pread(memory, 8, address))[0])


class GlooAbort:
    """Shuts down gloo's connections, except inodes in `keep`; wakes threads left without one."""

    def __init__(self, keep: Collection[int] = ()) -> None:
        self._keep = keep
        self._since: dict[_Wait, float] = {}
        self._settled_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether the last check saw a thread in gloo, woken or not."""
        return bool(self._since)

    def shut_down(self) -> frozenset[int]:
        """Shuts down all connections between gloo's pairs; returns their inodes."""
        _code()  # the check
        pairs = [pair for pair in pair_sockets().items() if pair[1] not in self._keep]
        for descriptor, inode in pairs:
            shut_down(descriptor, inode)
        return frozenset(inode for _, inode in pairs)

    def wake_blocked(self, *, settled: bool) -> int:
        """Checks once, and wakes every thread that nothing else will wake; returns their number.
        Must be called repeatedly, twice without a signal to the thread in between. `settled`: the
        latest `shut_down()` found no connection.
        """
        now, woken = time.monotonic(), 0
        self._since = {wait: self._since.get(wait, now) for wait in _waits()}
        self._settled_at = (self._settled_at or now) if settled else 0.0
        for wait, since in self._since.items():
            quiet = settled and now - max(since, self._settled_at) >= SETTLED_PATIENCE_S
            if quiet or now - since >= PATIENCE_S:
                woken += _wake(wait)
        return woken


def any_blocked() -> bool:
    """Whether any thread currently waits on a gloo object."""
    return bool(_waits())


def _waits() -> set[_Wait]:
    """The current waits: thread, its number of context switches, type and address of the object."""
    found = set()
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tid in os.listdir(_TASKS):
            fields = _read(f"{_TASKS}/{tid}/syscall").split()
            if len(fields) != 9 or fields[0] not in _FUTEX:
                continue
            held = _object_of(memory, int(fields[1], 16), int(fields[7], 16))
            status = b"" if held is None else _read(f"{_TASKS}/{tid}/status")
            if held is None or not status:
                continue
            switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
            found.add((int(tid), switches, *held))
    finally:
        os.close(memory)
    return found


def _object_of(memory: int, futex: int, stack: int) -> tuple[bytes, int] | None:
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
                # The vtable may be one of a base class; it has the offset to the whole object.
                (to_top,) = struct.unpack("=q", os.pread(memory, 8, words[index] - 16))
                return wanted, address + to_top
    return None


def _type_waited_for(memory: int, stack: int) -> bytes | None:
    ranges = _code()
    low = min((begin for begin, _ in ranges), default=0)
    high = max((begin for begin, _ in ranges), default=0) + _CODE
    for word in _words(memory, stack, _STACK):
        if low <= word < high:
            for begin, name in ranges:
                if begin <= word < begin + _CODE:
                    return name
    return None


def _words(memory: int, address: int, size: int) -> tuple[int, ...]:
    try:
        window = os.pread(memory, size, address)
    except (OSError, OverflowError):
        return ()  # the lower end is not mapped
    return struct.unpack(f"={len(window) // 8}Q", window[: len(window) // 8 * 8])


@functools.cache
def _code() -> tuple[tuple[int, bytes], ...]:
    """The addresses of the functions in which a thread may wait, and the types they wait on, as far
    as this build of torch fits. Checks that once, and logs what does not fit.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return ()
    found, missing = [], []
    for symbol, name in _WAITS_IN.items():
        needed = (symbol, *_CALLS[name])
        lacks = [each for each in needed if _function(each) is None]
        if not _has_type(name):
            lacks.append(f"the type {name.decode()}")
        missing += lacks
        if not lacks:
            found.append((ctypes.cast(_function(symbol), ctypes.c_void_p).value or 0, name))
    if missing:
        log.warning(
            "the gloo of torch %s is not one that outlast knows (missing: %s): a rank that still "
            "waits in gloo when its connections have ended may wait for the timeout of its process "
            "group; give init_process_group() a timeout= below the hard timeout",
            torch.__version__,
            ", ".join(dict.fromkeys(missing)),
        )
    return tuple(found)


@functools.cache
def _library() -> tuple[int, int]:
    bounds = [
        int(bound, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libtorch_cpu" in line
        for bound in line.partition(" ")[0].split("-")
    ]
    return (min(bounds), max(bounds)) if bounds else (0, 0)


def _wake(wait: _Wait) -> bool:
    """Whether the thread was still in this wait: calls each method as long as it is."""
    _, _, name, address = wait
    called = False
    for symbol in _CALLS[name]:
        if wait not in _waits():
            break
        called = True
        if name == _PAIR:
            result = ctypes.c_void_p()  # a std::exception_ptr, which is not needed
            _function(symbol)(ctypes.byref(result), ctypes.c_void_p(address), _string())
        else:
            _function(symbol)(ctypes.c_void_p(address))
    return called


@functools.cache
def _string() -> Any:
    """A std::string with `_TEXT`."""
    if _NEW_STRING:  # short enough to be stored inline: pointer, length, 16 characters
        text = ctypes.create_string_buffer(bytes(16) + _TEXT, 32)
        words = ctypes.cast(text, ctypes.POINTER(ctypes.c_size_t))
        words[0], words[1] = ctypes.addressof(text) + 16, len(_TEXT)
        return text
    # A pointer to the characters, which come after length, capacity and the number of references:
    # -1, so that a copy of the string does not share, and free, this memory.
    shared = ctypes.create_string_buffer(struct.pack("NNi4x", len(_TEXT), len(_TEXT), -1) + _TEXT)
    found = ctypes.c_void_p(ctypes.addressof(shared) + 24)
    found.memory = shared  # type: ignore[attr-defined]
    return ctypes.byref(found)


def _has_type(name: bytes) -> bool:
    """Whether `type_name` finds this name from an object that is only the type's vtable pointer."""
    library = _torch_library()
    try:
        vtable = ctypes.c_char.in_dll(library, f"_ZTV{name.decode()}")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    instance = ctypes.c_void_p(ctypes.addressof(vtable) + 16)  # after offset and type_info
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return type_name(memory, ctypes.addressof(instance)) == name
    finally:
        os.close(memory)


@functools.cache
def _torch_library() -> ctypes.CDLL | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD)
    except OSError:
        return None


@functools.cache
def _function(symbol: str) -> Any:
    function = getattr(_torch_library(), symbol, None)
    if function is None:
        return None
    function.restype = None
    return function
