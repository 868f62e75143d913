"""Ends the creation of an NCCL communicator, for which no other rank comes any more.

`ncclCommInitRank` returns when all ranks have called it. Until then torch does not know of the
communicator, so no abort reaches it (`ncclCommSplit` besides holds the mutex of its parent). It
waits in `accept`, which NCCL calls again and again, on sockets of its own: once they are shut down,
`accept` fails, and the creation with it.

Which sockets are these? NCCL has others, such as those of its RAS thread, which would not notice
and use a core for ever. A listener belongs to a creation if its address is on the stack of a thread
either after its own descriptor, as in NCCL's `ncclSocket`, or 28 bytes after an address of the same
host, as in the `extInfo` that a rank sends to the root: both are so from NCCL 2.18 to 2.30. The
thread that serves the root's address has a name, and waits in one call of `accept`. What this does
not end is in "Backends" of `docs/gpu.md`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from outlast.system import devices
from outlast.system.sockets import peer, shut_down, socket_inodes

_ROOT_THREAD = b"NCCL BootstrapR"
_ACCEPT = {"x86_64": b"43", "aarch64": b"202"}.get(os.uname().machine, b"none")
_NUMBERS_BEFORE = 4  # of an `ncclSocket`, before its address, the descriptors among them
_ADDRESS = 28  # bytes of an address in NCCL: a sockaddr_in6
_CHUNK, _MOST = 1 << 16, 1 << 21  # of a stack, in bytes, from its base


class _Listener(NamedTuple):
    descriptor: int
    inode: int
    name: tuple[str, int]
    start: bytes  # of its address in memory: family, port and, for IPv4, the number of the host
    host: slice  # where the number of the host is in an address


def end_creations(keep: Collection[int]) -> None:
    """Ends all creations, except by sockets of these inodes."""
    inodes = {} if devices.available() is None else socket_inodes()
    new = [item for item in inodes.items() if item[1] not in keep]
    listeners = [found for item in new if (found := _listener(*item)) is not None]
    if not listeners:
        return
    serving = _served_by_root()
    ended = [each for each in listeners if each.descriptor in serving]
    for stack in _stacks():
        ended += [each for each in listeners if each not in ended and _is_in(stack, each)]
    names = {each.name for each in ended}
    for each in ended:
        shut_down(each.descriptor, each.inode)
    for descriptor, inode in new:  # the ring, once a rank has accepted
        if peer(descriptor) is not None and _name(descriptor) in names:
            shut_down(descriptor, inode)


def _listener(descriptor: int, inode: int) -> _Listener | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        address, port = found.getsockname()[:2]
        number = socket.inet_pton(found.family, address.partition("%")[0])
        start = struct.pack("=H", found.family) + struct.pack("!H", port)
        if found.family == socket.AF_INET:
            return _Listener(descriptor, inode, (address, port), start + number, slice(4, 8))
        return _Listener(descriptor, inode, (address, port), start, slice(8, 24))
    return None  # closed meanwhile


def _name(descriptor: int) -> tuple[str, int] | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        address, port = found.getsockname()[:2]
        return str(address), int(port)
    return None


def _is_in(stack: bytes, listener: _Listener) -> bool:
    at = stack.find(listener.start)
    while at >= 0:
        numbers = memoryview(stack)[max(at % 4, at - 4 * _NUMBERS_BEFORE) : at].cast("i")
        if listener.descriptor in numbers:
            return True
        before, own = stack[max(0, at - _ADDRESS) : at], stack[at : at + _ADDRESS]
        if before[:2] == own[:2] and before[listener.host] == own[listener.host]:
            return True
        at = stack.find(listener.start, at + 1)
    return False


def _stacks() -> list[bytes]:
    """The stacks of the threads that run Python, but for this one: the main thread, and those in
    which autograd calls hooks. The id of a thread is an address just above its stack (glibc). One
    that waits in the kernel uses its stack only down to an address that Linux shows; to read all of
    2 MiB of each took most of the time of an abort.
    """
    main, maps = threading.main_thread().ident, Path("/proc/self/maps").read_text().splitlines()
    ends = [int(each.split()[0].partition("-")[2], 16) for each in maps if "[stack]" in each]
    others = sys._current_frames().keys() - {main, threading.get_ident()}
    calls = [each.split() for each in _of_tasks("syscall").values()]
    used = [int(each[-2], 16) for each in calls if len(each) > 2]
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [_stack(memory, end, used) for end in (*ends, *others)]
    finally:
        os.close(memory)


def _stack(memory: int, end: int, used: Collection[int]) -> bytes:
    parts: list[bytes] = []
    last = max((each for each in used if end - _MOST < each < end), default=end - _MOST)
    for begin in range(end - _CHUNK, max(last - _CHUNK, _CHUNK), -_CHUNK):
        try:
            parts.insert(0, os.pread(memory, _CHUNK, begin))
        except (OSError, OverflowError):
            break  # the stack of the main thread is mapped as it grows; a thread may have ended
    return b"".join(parts)


def _served_by_root() -> set[int]:
    """The descriptors from which the threads accept that serve a root."""
    calls, found = _of_tasks("syscall"), set[int]()
    for tid, name in _of_tasks("comm").items():
        call, *arguments = calls.get(tid, b"-1").split()
        if name.strip() == _ROOT_THREAD and call == _ACCEPT:
            found.add(int(arguments[0], 16))
    return found


def _of_tasks(name: str) -> dict[str, bytes]:
    """This file of each thread of the process."""
    found = {}
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            found[tid] = Path(f"/proc/self/task/{tid}/{name}").read_bytes()
    return found
