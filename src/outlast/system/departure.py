"""How a worker tells its launcher that its rank has left the training, while its process goes on:
by an error, or because its script is at its end, and Python waits for threads or exit handlers.

One datagram, to a socket that the launcher names after its job, without a file: it needs neither
the store, which may be lost, nor a descriptor in the worker. The kernel names the sender's process,
so no other process can speak for it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import signal
import socket
import struct
import sys
import threading
from typing import Any

_SIZE = 64 * 1024
_CREDENTIALS = struct.Struct("3i")
_SEND_S = 1.0  # the queue of a socket has room for ten datagrams only, on many systems
_told_end = False


@dataclasses.dataclass(frozen=True)
class Departure:
    """`code` is the exit code that the exception gives the process, unless the program catches it;
    `call` the prefix of the keys of the wrapped call that was left, empty at the end of the script;
    `threads` the names of those for which Python waits at its end. With `asks` it has not left: it
    asks, for this reason, that its host leaves the job.
    """

    code: int
    call: str
    threads: list[str]
    asks: str = ""

    @classmethod
    def by(cls, error: BaseException | None, call: str = "") -> Departure:
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        main = threading.main_thread()
        threads = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        return cls(code, call, threads[:16])

    @classmethod
    def parse(cls, data: bytes) -> Departure:
        return cls(**json.loads(data))

    def tell(self, job: str) -> None:
        """`job` is the launcher's name of the job. Without effect if the launcher has ended."""
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.settimeout(_SEND_S)
            sender.sendto(json.dumps(dataclasses.asdict(self)).encode(), _address(job))


def tell_end_of_script(job: str) -> None:
    """Has Python tell it when the script is at its end, before it waits for threads. The last who
    asks is called first, before what waits for the threads of a pool: so ask again late.
    """
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):  # it is at its end
        if job:
            register(lambda: _tell_end(job))


def _tell_end(job: str) -> None:
    global _told_end
    if _told_end:  # once, although each call has asked for it
        return
    _told_end = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_without_waiting)
    Departure.by(getattr(sys, "last_value", None)).tell(job)


def _end_without_waiting(*_: object) -> None:
    """Python drops what its last waits raise, and goes on to the exit code of `sys.exit`."""
    sys.unraisablehook = lambda _: None
    raise SystemExit


class Departures:
    """The launcher's end."""

    def __init__(self, job: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(_address(job))

    def receive(self) -> tuple[int, bytes]:
        """The process ID of a sender, which may be any process, and what to `parse`."""
        data, ancillary, *_ = self.socket.recvmsg(_SIZE, socket.CMSG_SPACE(_CREDENTIALS.size))
        pid, _, _ = _CREDENTIALS.unpack(ancillary[0][2])
        return pid, data


def _address(job: str) -> str:
    return f"\0outlast-departures-{job}"
