"""Workers of a launcher that the zygote has started: by fork too, with torch already imported.

A worker that trains imports for two seconds of CPU time, more than most tests with a launcher take
for all else. A launcher needs its workers as children; so `serve` gives it a child, the *nursery*,
which has the state of the zygote, and forks a process for each worker. The kernel makes that a
child of the launcher, a subreaper, when the process between them ends:

    zygote -- launcher -- nursery -- (ends at once) -- worker

In the launcher, `subprocess.Popen` asks the nursery for what `_program` knows: workers and standbys
of `outlast run`, and workers of torchrun. The launcher does not see the nursery among its
descendants, and the nursery ends with its launcher.
"""

from __future__ import annotations

import ctypes
import fcntl
import inspect
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

Task = tuple[dict[str, Any], list[int]]
"""A request, with its descriptors for stdin, stdout and stderr."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHIM = "exec_shim.py"
_MOST_DESCRIPTORS = 16
_HIGH = 500
"""Descriptors from here on are free: a place for some while others get their numbers."""


def serve() -> Task | None:
    """Starts the nursery; returns nothing in the launcher, and its task in each worker."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair()
    nursery = os.fork()
    if nursery:
        theirs.close()
        _ask_instead_of_starting(ours)
        _hide(nursery)
        return None
    ours.close()
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while (task := receive(theirs)) is not None:
        request, descriptors = task
        pid = _fork_for_parent()
        if pid == 0:
            theirs.close()
            _do_as_the_command(request, descriptors)
            return request, descriptors[:3]
        theirs.sendall(f"{pid}\n".encode())
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def receive(channel: socket.socket) -> Task | None:
    """The next request and its descriptors; nothing at the end of the stream."""
    first, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    if not first:
        return None
    line = bytearray(first)
    while not line.endswith(b"\n"):
        line += channel.recv(65536)
    return json.loads(line), descriptors


def send(channel: socket.socket, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends what `receive` returns. The descriptors go with the first byte; the rest may take
    several messages.
    """
    data = json.dumps(request).encode() + b"\n"
    socket.send_fds(channel, [data[:1]], descriptors)
    channel.sendall(data[1:])


def _fork_for_parent() -> int:
    """Forks a process that is a child of this one's parent: its pid, or 0 in it.

    It begins, and its pid is returned, only then: before, that parent could not wait for it.
    """
    go_on, hold = os.pipe()
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        for end in (hold, read, write):
            os.close(end)
        os.read(go_on, 1)  # the end of the pipe, when the other end is closed below
        os.close(go_on)
        return 0
    os.waitpid(between, 0)
    pid = int(os.read(read, 20))
    for end in (go_on, read, write, hold):
        os.close(end)
    return pid


# ------------------------------------------------------------------------------- in the launcher


def _ask_instead_of_starting(channel: socket.socket) -> None:
    """Makes `subprocess.Popen` ask the nursery for workers."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    replies = channel.makefile("r")

    def start(popen: Any, *args: Any) -> None:
        given = inspect.signature(execute).bind(popen, *args).arguments
        program = _program(given["args"])
        if program is None:
            execute(popen, *args)
            return
        passed = list(given["pass_fds"])
        request = {
            **program,
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": str(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
            "pass_fds": passed,
        }
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        send(channel, request, [*(max(fd, n) for n, fd in enumerate(streams)), *passed])
        popen.pid = int(replies.readline())
        popen._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[name] for name in ends))

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _program(command: Any) -> dict[str, Any] | None:
    """What a worker's command line runs; nothing for other commands."""
    words = [str(word) for word in command] if isinstance(command, list | tuple) else []
    dies_with_launcher = len(words) > 5 and words[3].endswith(_SHIM)
    if dies_with_launcher:
        words = words[5:]  # python -I -S exec_shim.py LAUNCHER_PID
    if words[:2] != [sys.executable, "-u"] or (words[2][0] == "-" and words[2] != "-m"):
        return None
    return {"command": words[2:], "unbuffered": True, "dies_with_launcher": dies_with_launcher}


def _hide(nursery: int) -> None:
    children = psutil.Process.children

    def visible(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in children(process, recursive) if child.pid != nursery]

    psutil.Process.children = visible  # type: ignore[method-assign]


# --------------------------------------------------------------------------------- in a worker


def _do_as_the_command(request: dict[str, Any], descriptors: list[int]) -> None:
    """What `Popen` and the launcher's command do before the program begins."""
    if request["dies_with_launcher"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if request["session"]:
        os.setsid()
    for index, descriptor in enumerate(descriptors):
        descriptors[index] = fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH)
        os.close(descriptor)
    for number, descriptor in zip(request["pass_fds"], descriptors[3:], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
    )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
