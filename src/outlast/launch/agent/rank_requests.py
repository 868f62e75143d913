"""How `outlast drain --rank` reaches a launcher on the same machine: a datagram each way.

The launcher's socket has a name without a file. The kernel says which user has sent a request:
root and the user of the launcher may ask, who may also kill it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.errors import LaunchError
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.event_loop import EventLoop

_NAME = "outlast-requests-"
_CREDENTIALS = struct.Struct("3i")
_SIZE = 64 * 1024
_OTHER_RUN = "the run is "


@dataclasses.dataclass(frozen=True)
class _Request:
    run_id: str  # empty for any
    rank: int
    reason: str


class RankRequests:
    """The launcher's end. `move` moves a rank, for a reason; it returns why it cannot, if so."""

    def __init__(self, job: JobSpec, loop: EventLoop, move: Callable[[int, str], str]) -> None:
        self._run_id, self._loop, self._move = job.run_id, loop, move
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{_NAME}{job.mark}")
        loop.watch(self._socket.fileno(), selectors.EVENT_READ, self._read)

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        data, ancillary, _, sender = self._socket.recvmsg(_SIZE, space)
        _, user, _ = _CREDENTIALS.unpack(ancillary[0][2])
        if user not in (0, os.geteuid()):
            problem = f"run {self._run_id!r} is another user's"
        else:
            problem = self._answer(data)
        if sender:
            with contextlib.suppress(OSError):  # it has ended
                self._socket.sendto(problem.encode(), sender)

    def _answer(self, data: bytes) -> str:
        try:
            request = msgspec.json.decode(data, type=_Request)
        except msgspec.MsgspecError as e:
            return f"no request to move a rank: {e}"
        if request.run_id not in ("", self._run_id):
            return f"{_OTHER_RUN}{self._run_id}"
        return self._move(request.rank, request.reason)


def ask(run_id: str, rank: int, reason: str, limit_s: float) -> None:
    """Asks the launcher of this run on this machine to move a rank. A `LaunchError` if it does not,
    or if there is none; `run_id` may be empty if there is one.
    """
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = {line.rpartition("@")[2] for line in lines if f"@{_NAME}" in line}
    if len(names) != 1 and not run_id:
        number = len(names) or "no"
        raise LaunchError(
            f"{number} jobs run on this machine: name one by --rdzv-id, or give --rdzv-endpoint"
        )
    request = msgspec.json.encode(_Request(run_id, rank, reason))
    problems, others = list[str](), list[str]()
    for name in sorted(names):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.bind("")  # a name of the kernel's choice, for the answer
            own.settimeout(limit_s)
            try:
                own.sendto(request, f"\0{name}")
                problem = own.recv(_SIZE).decode()
            except OSError as e:
                problem = f"no answer of a launcher: {e}"
        if not problem:
            return
        (others if problem.startswith(_OTHER_RUN) else problems).append(problem)
    if not problems:
        runs = ", ".join(other.removeprefix(_OTHER_RUN) for other in others)
        those = f"; those that do: {runs}" if runs else ""
        problems = [f"run {run_id!r} does not run on this machine{those}"]
    raise LaunchError("; ".join(problems))
