"""Anonymous shared memory between processes.

It is an anonymous file in memory (`memfd_create`): one process creates it and sends the descriptor
to another. It has no name in any file system, so nothing is left behind when the last process that
holds it ends; and it outlives the process that created it, as long as another one holds it. Other
processes of the user, on the same host, may also open it through `/proc` (`MemoryName`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psutil

from outlast.system.parallel import in_threads

PAGE_BYTES = mmap.PAGESIZE

_CGROUP = Path("/sys/fs/cgroup")
_MADV_POPULATE_WRITE = 23  # Linux 5.14: maps and allocates all pages at once
_POPULATED_BYTES = 1 << 20  # with 128 MiB, a tensor's allocation meanwhile waited for 25 ms
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# `move(to, source, size_bytes)` copies between two addresses; a call through CDLL releases the GIL.
# A copy that bypasses the caches was measured and dropped: it took as long, or longer.
move = _libc.memmove
move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
move.restype = None
move_quickly = ctypes.PyDLL(None).memmove
"""Likewise, and keeps the GIL: for a few bytes, to get it again takes longer than the copy."""
move_quickly.argtypes, move_quickly.restype = move.argtypes, None


def page_up(size_bytes: int) -> int:
    """The next multiple of the page size."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory that can be used without swapping, and within the limit of the container. What is
    cached of files, and was not read lately, is not counted as used: the kernel gives it up first.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # "max" is no limit; version 1 of cgroups has other files
        return available
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return min(available, max(0, limit - used + cached))


def running_kernel() -> str:
    """Another one on each host, and after each start of a host; an `OSError` if it is not known."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclasses.dataclass(frozen=True)
class MemoryName:
    """Names shared memory to the other processes of the host, as long as process `pid` holds it."""

    kernel: str
    pid: int
    descriptor: int
    inode: int

    def open(self) -> int:
        """A descriptor to read it; an `OSError` if it is not there, or not for this process: in
        another container, `pid` may be another process, with another `inode`.
        """
        if self.kernel != running_kernel():
            raise OSError("the memory is on another host")
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        if not os.readlink(path).startswith("/memfd:"):  # nothing else is opened
            raise OSError(f"{path} is no memory")
        found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if os.fstat(found).st_ino != self.inode:
            os.close(found)
            raise OSError(f"{path} is other memory")
        return found


class SharedMemory:
    """Shared memory of a fixed size, in whole pages: new memory, or that of a descriptor from
    another process. It lives as long as any copy of its descriptor. `address` is where it is here.
    `is_populated`: its pages were allocated, by `populate` or by all that was written.
    """

    is_populated = False

    def __init__(self, size_bytes: int, descriptor: int | None = None) -> None:
        self.size_bytes = page_up(max(size_bytes, 1))
        if descriptor is None:
            descriptor = os.memfd_create("outlast-snapshot", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, self.size_bytes)
        elif os.fstat(descriptor).st_size < self.size_bytes:
            raise ValueError(f"the memory is smaller than {self.size_bytes} bytes")
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, self.size_bytes)
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    @property
    def name(self) -> MemoryName:
        inode = os.fstat(self.descriptor).st_ino
        return MemoryName(running_kernel(), os.getpid(), self.descriptor, inode)

    @property
    def intact(self) -> bool:
        """Whether all of it is still there: an access to what is not ends the process by SIGBUS."""
        return self.descriptor >= 0 and os.fstat(self.descriptor).st_size >= self.size_bytes

    def close(self) -> None:
        """Releases the memory. Its pages stay until all tensors in it are gone too."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a tensor still uses it: unmapped with the last of them


def populate(memory: SharedMemory, threads: int = 2, end: Event | None = None) -> None:
    """Allocates all pages of `memory` now, or until `end`, so that the first copy into it is as
    fast as later ones: a little at a time, since other threads that map memory wait for it.
    """
    end = end or Event()

    def work(parts: Iterator[int]) -> None:
        for at in parts:
            if not end.is_set():
                allocate(memory.address + at, min(_POPULATED_BYTES, memory.size_bytes - at))

    parts = range(0, memory.size_bytes, _POPULATED_BYTES)
    try:
        in_threads(work, parts, threads, "outlast-allocate")
    except RuntimeError:  # the interpreter ends, and starts no thread
        work(iter(parts))
    memory.is_populated = not end.is_set()


def allocate(address: int, size_bytes: int) -> None:
    """Allocates these pages together; a kernel without that does so at the first access to each."""
    _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The memory at `address` as writable bytes. The caller keeps its owner alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
