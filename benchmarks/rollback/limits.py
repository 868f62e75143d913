"""What the machine can do with as many bytes: a copy, a loopback socket, a raw read with hashes,
and a copy by the kernel between processes into new memory.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.checkpoint.limits import Reading, copy_time, in_threads
from benchmarks.lib.rank_processes import FOLDER

__all__ = ["limits"]

_CHUNK, _PIECE = 4 << 20, 8 << 20


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_read = ctypes.CDLL(None, use_errno=True).process_vm_readv
_of = ctypes.POINTER(_Vector), ctypes.c_ulong
_read.restype, _read.argtypes = ctypes.c_ssize_t, (ctypes.c_int, *_of, *_of, ctypes.c_ulong)


def limits(size_bytes: int, rounds: int) -> dict[str, float]:
    """The shortest times in seconds, by name, with one thread, into memory that is warm; but for
    `neighbor`, with two threads and into new memory, as a replacement reads a survivor's state.
    """
    source = torch.ones(size_bytes, dtype=torch.uint8)
    buffer = torch.zeros_like(source)
    found = {
        "copy": min(copy_time([source], [buffer]) for _ in range(rounds)),
        "socket": min(_socket_time(source, buffer) for _ in range(rounds)),
        "neighbor": min(_neighbor_time(source) for _ in range(rounds)),
    }
    root = FOLDER.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="limits-") as name:
        path = Path(name) / "bytes"
        with path.open("wb") as file:
            file.write(source.numpy().data)
            os.fsync(file.fileno())
        reading = Reading([path], 1)
        found["warm"] = min(reading.time(cold=False, direct=False) for _ in range(rounds))
        found["cold"] = min(reading.time(cold=True, direct=False) for _ in range(rounds))
    return found


def _neighbor_time(source: torch.Tensor) -> float:
    """Seconds to read the bytes as those of another process: the first access to each page of new
    memory takes twice as long as the copy.
    """
    began = time.perf_counter()
    into = torch.empty_like(source)
    places = iter(range(0, source.nbytes, _PIECE))

    def read(_: int) -> None:
        for at in places:  # a range iterator's next is atomic
            size = min(_PIECE, source.nbytes - at)
            here, there = _Vector(into.data_ptr() + at, size), _Vector(source.data_ptr() + at, size)
            if _read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != size:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

    in_threads(2, read)
    return time.perf_counter() - began


def _socket_time(source: torch.Tensor, buffer: torch.Tensor) -> float:
    """Seconds to send the bytes over a TCP connection to this host."""
    sent, into = memoryview(source.numpy().data), memoryview(buffer.numpy().data)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        began = time.perf_counter()
        # The calls release the GIL: both sides run in parallel, as two processes do.
        thread = threading.Thread(target=sender.sendall, args=(sent,))
        thread.start()
        done = 0
        while done < len(into):
            done += receiver.recv_into(into[done : done + _CHUNK])
        thread.join()
        return time.perf_counter() - began
