"""The injector's side of its connections to the writer processes of this process.

A writer process under a plan (`storage.py`) connects to an abstract Unix socket, which
needs no file and ends with its processes. It asks before each operation on the storage; the answer
comes from `WriterServer`, which thereby knows what the writer is doing, and can hold it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from outlast.chaos.fired_faults import identity
from outlast.chaos.kinds import Kind
from outlast.clock import Clock
from outlast.system.parallel import start_thread
from outlast.system.sockets import process_at

WRITE, PUT, PUBLISH, PUBLISHED = "write", "put", "publish", "published"
"""When a writer asks: in the middle of a write, before the manifest is written, before the
checkpoint becomes visible, and after that.
"""

_DAMAGE = (Kind.TORN_WRITE, Kind.FLIPPED_BYTE)


def address_of(pid: int) -> str:
    """The address at which the process with this id serves its writers."""
    return f"\0outlast-chaos-{identity(pid)}"


class WriterServer:
    """Serves the writer processes. `reached` is called with each operation that a writer asks
    about, in a thread of that writer, which waits until it returns.
    """

    def __init__(self, clock: Clock, reached: Callable[[str], None]) -> None:
        self._clock, self._reached = clock, reached
        self._orders: list[tuple[Kind, float]] = []
        self._full_until = 0.0
        self._writers: dict[int, socket.socket] = {}  # by process id
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address_of(os.getpid()))
        self._listener.listen()
        self._thread = start_thread("outlast-chaos-writers", self._accept)

    @property
    def connected(self) -> bool:
        return bool(self._writers)

    def order(self, kind: Kind, seconds: float) -> None:
        """Orders a fault of storage, for the next write of any writer; a `disk_full` of some
        seconds, for all writes in that time.
        """
        with self._lock:
            if kind is Kind.DISK_FULL and seconds > 0:
                self._full_until = self._clock.now() + seconds
            else:
                self._orders.append((kind, seconds))

    def kill(self) -> None:
        for pid in list(self._writers):
            with contextlib.suppress(ProcessLookupError):  # it is ending; its connection is not yet
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all connections; the writers go on without faults."""
        # Not only `close`, which does not wake a thread that waits in `accept` or `recv`.
        for connection in (self._listener, *self._writers.values()):
            with contextlib.suppress(OSError):  # the other side has ended
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return  # closed
            pid, uid = process_at(connection)
            if uid != os.getuid():
                connection.close()
                continue
            self._writers[pid] = connection
            start_thread("outlast-chaos-writer", self._serve, pid, connection)

    def _serve(self, pid: int, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    operation = line.strip()
                    self._reached(operation)
                    stream.write(json.dumps(self._answer(operation)) + "\n")
                    stream.flush()
        except OSError:
            pass  # the writer was killed
        finally:
            self._writers.pop(pid, None)

    def _answer(self, operation: str) -> dict[str, Any]:
        if operation == PUBLISH:
            return {}
        with self._lock:
            for index, (kind, seconds) in enumerate(self._orders):
                if operation != PUBLISHED or kind in _DAMAGE:
                    del self._orders[index]
                    return {"kind": kind.value, "seconds": seconds}
            if operation != PUBLISHED and self._clock.now() < self._full_until:
                return {"kind": Kind.DISK_FULL.value, "seconds": 0.0}
        return {}
