"""Finds and shuts down the sockets of gloo's pairs, which ends in-flight collectives.

Gloo has no working abort: the backend's `abort()` and `shutdown()` return at once, and the
collective continues until its timeout (observed with torch 2.13). However, after `shutdown(2)` on
the connected sockets, every blocked operation raises within a millisecond. The difficulty is to
find the sockets of the process that belong to gloo, and to touch no others.

Gloo's event loop reveals them. Each of its connections is registered in an epoll instance together
with a pointer to the C++ object that handles it, and Linux shows both in
`/proc/self/fdinfo/<epoll fd>` (`tfd` and `data`, see proc_pid_fdinfo(5)). From that pointer, the
Itanium C++ ABI's layout leads to the object's run-time type name: the first word of the object
points to its vtable, the word before the vtable to the type_info, whose second word points to the
name: `N4gloo9transport3tcp4PairE`. Memory is read through `/proc/self/mem`, where an invalid
address is an error and not a crash, so event loops that keep something else in `data` (libuv and
Python keep the descriptor itself) are skipped. Listening sockets have another type and are left
alone: shutting one down terminates the process (std::terminate).
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from outlast.system.sockets import descriptors_of, socket_inode

_EVENT = re.compile(rb"^tfd:\s+(\d+) events:\s+[0-9a-f]+ data:\s+([0-9a-f]+)", re.MULTILINE)


def pair_sockets() -> dict[int, int]:
    """The sockets of gloo's connected pairs in this process: inode by descriptor."""
    found: dict[int, int] = {}
    memory = -1
    try:
        for epoll in descriptors_of("anon_inode:[eventpoll]"):
            try:
                registered = Path(f"/proc/self/fdinfo/{epoll}").read_bytes()
            except OSError:
                continue  # closed by its owner in the meantime
            for descriptor, data in _EVENT.findall(registered):
                address = int(data, 16)
                if address < 1 << 16:
                    continue  # a descriptor, not a pointer
                if memory < 0:
                    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
                name = type_name(memory, address)
                if name.startswith(b"N4gloo9transport3tcp") and b"Pair" in name:
                    inode = socket_inode(int(descriptor))
                    if inode is not None:
                        found[int(descriptor)] = inode
    finally:
        if memory >= 0:
            os.close(memory)
    return found


def type_name(memory: int, address: int) -> bytes:
    """The run-time type name of the C++ object at `address`; empty if there is none.
    `address` may be any number; `memory` is an open `/proc/self/mem`.
    """
    try:
        vtable = _word(memory, address)
        type_info = _word(memory, vtable - 8)
        name = _word(memory, type_info + 8)
        return os.pread(memory, 80, name).partition(b"\0")[0]
    except (OSError, OverflowError, struct.error):
        return b""


def _word(memory: int, address: int) -> int:
    return int(struct.unpack("=Q", os.pread(memory, 8, address))[0])
