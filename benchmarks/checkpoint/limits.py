"""The limits of the machine: raw copies, writes and reads, the lower bounds of a checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xxhash

__all__ = [
    "Reading",
    "Writing",
    "copy_in_threads",
    "copy_time",
    "drop_cache",
    "hashed_copy_time",
    "in_threads",
    "settle",
]

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_PIECE = 16 << 20
_CHUNK = 4 << 20
_CACHED = 768 << 10


def settle() -> None:
    """Waits for the disk to finish earlier writes, so that they do not disturb a measurement."""
    os.sync()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(0)` to `work(count - 1)` in parallel."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copy_time(sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> float:
    """Seconds to copy tensors into allocated memory, by torch or by plain threads, whichever is
    faster: torch's copy is slow when its threads have gone to sleep.
    """
    began = time.perf_counter()
    for source, to in zip(sources, buffers, strict=True):
        to.copy_(source)
    between = time.perf_counter()
    copy_in_threads(sources, buffers)
    return min(between - began, time.perf_counter() - between)


def copy_in_threads(sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Copies tensors into allocated memory, by as many plain threads as torch uses."""
    pieces = iter(
        [
            (to.data_ptr() + at, source.data_ptr() + at, min(_PIECE // 2, source.nbytes - at))
            for source, to in zip(sources, buffers, strict=True)
            for at in range(0, source.nbytes, _PIECE // 2)
        ]
    )

    def move(_: int) -> None:
        for piece in pieces:  # a list iterator's next is atomic
            _memmove(*piece)

    in_threads(torch.get_num_threads(), move)


def hashed_copy_time(sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> float:
    """Seconds to copy tensors, and to hash each chunk at its source while it is in the cache: what
    a restore from memory that verifies cannot do without.
    """
    chunks = iter(
        [
            (source, to, at, min(at + _CHUNK, source.nbytes))
            for source, to in zip(sources, buffers, strict=True)
            for at in range(0, source.nbytes, _CHUNK)
        ]
    )

    def move(_: int) -> None:
        for source, to, begin, end in chunks:
            digest = xxhash.xxh3_128()
            for at in range(begin, end, _CACHED):
                size, address = min(_CACHED, end - at), source.data_ptr() + at
                _memmove(to.data_ptr() + at, address, size)
                digest.update((ctypes.c_char * size).from_address(address))
            digest.digest()

    began = time.perf_counter()
    in_threads(torch.get_num_threads(), move)
    return time.perf_counter() - began


class Writing:
    """Raw writes with fsync, through the page cache or with O_DIRECT.

    Args:
        folder: the folder of the file.
        size_bytes: the number of bytes, rounded down to whole pages.
        threads: the number of parallel writes.
    """

    def __init__(self, folder: Path, size_bytes: int, threads: int) -> None:
        self._folder = folder
        self._size = size_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._threads = threads
        self._memory = mmap.mmap(-1, self._size)
        torch.frombuffer(self._memory, dtype=torch.uint8).random_()
        self._view = memoryview(self._memory)

    def time(self, *, direct: bool) -> float:
        """Seconds until everything is durable. The file system may not support O_DIRECT."""
        path = self._folder / f"raw-{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        pieces = iter(range(0, self._size, _PIECE))
        lock = threading.Lock()
        began = time.perf_counter()
        file = os.open(path, flags, 0o644)

        def write(_: int) -> None:
            while True:
                with lock:
                    at = next(pieces, None)
                if at is None:
                    return
                end = min(at + _PIECE, self._size)
                while at < end:
                    at += os.pwrite(file, self._view[at:end], at)

        try:
            os.posix_fallocate(file, 0, self._size)
            in_threads(self._threads, write)
            os.fsync(file)
            seconds = time.perf_counter() - began
        finally:
            os.close(file)
            path.unlink()
        return seconds


class Reading:
    """Raw reads of files into allocated memory, with an xxh3 hash of each chunk.

    Args:
        paths: the files.
        threads: the number of parallel reads.
    """

    def __init__(self, paths: Sequence[Path], threads: int) -> None:
        self.paths = paths
        self._threads = threads
        self._sizes = [path.stat().st_size for path in paths]
        self._memory = [mmap.mmap(-1, size) for size in self._sizes]
        for memory in self._memory:
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    def time(self, *, cold: bool, direct: bool) -> float:
        """Seconds until everything is read.

        Args:
            cold: whether to drop the files from the page cache first.
            direct: whether to read with O_DIRECT.
        """
        if cold:
            drop_cache(self.paths)
        lock = threading.Lock()
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        views = [memoryview(memory) for memory in self._memory]
        began = time.perf_counter()
        files = [os.open(path, flags) for path in self.paths]
        chunks = iter(
            [(n, at) for n, size in enumerate(self._sizes) for at in range(0, size, _CHUNK)]
        )

        def read(_: int) -> None:
            while True:
                with lock:
                    number, at = next(chunks, (-1, 0))
                if number < 0:
                    return
                view = views[number][at : min(at + _CHUNK, self._sizes[number])]
                done = 0
                while done < len(view):
                    done += os.preadv(files[number], [view[done:]], at + done)
                xxhash.xxh3_128_digest(view)

        try:
            in_threads(self._threads, read)
            return time.perf_counter() - began
        finally:
            for file in files:
                os.close(file)


def drop_cache(paths: Sequence[Path]) -> None:
    """Drops files from this machine's page cache; a hypervisor may still cache them."""
    for path in paths:
        with contextlib.closing(open(path, "rb")) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
