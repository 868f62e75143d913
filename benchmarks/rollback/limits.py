"""What the machine can do with as many bytes: a copy, a loopback socket, a raw read with hashes."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.checkpoint.limits import Reading, copy_time
from benchmarks.lib.rank_processes import FOLDER

__all__ = ["limits"]

_CHUNK = 4 << 20


def limits(size_bytes: int, rounds: int) -> dict[str, float]:
    """The shortest times in seconds, by name, with one thread, into memory that is warm."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    buffer = torch.zeros_like(source)
    found = {
        "copy": min(copy_time([source], [buffer]) for _ in range(rounds)),
        "socket": min(_socket_time(source, buffer) for _ in range(rounds)),
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
