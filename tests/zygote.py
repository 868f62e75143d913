"""Starts Python processes without the seconds that `import torch` takes: by fork.

    with Zygote() as zygote, Job(tmp_path, script, spawn=zygote.spawn) as job:
        ...

The zygote is a process that has imported torch and outlast and done nothing with them. On request
it forks; the child becomes what a fresh interpreter with the same command line would be: a session
of its own, its own environment, output and `sys.argv`, and then the script as `__main__`. It is
its parent, so it tells the exit code of a child that has ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from procs import MARKER

_BLANK = "0" * 32
"""What the zygote carries in place of a job's id, so that a child can put the id there."""


class Zygote:
    """The test's side: one request at a time, each answered at once.

    Args:
        imports: modules that its children have from the beginning, besides torch and outlast.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            MARKER: _BLANK,
            "OMP_NUM_THREADS": "1",  # no pool of threads: they would not be there after a fork
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imports],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        self._lines = ours.makefile("r")

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._socket.close()  # its sign to end
        self._process.wait()

    def spawn(
        self, command: Sequence[str], env: Mapping[str, str], out: Path, err: Path
    ) -> _Process:
        """Starts `python script args...`, as `Job` asks for it."""
        _, script, *args = command
        out.touch()
        err.touch()
        request = {"script": script, "args": args, "env": dict(env)}
        pid = self._ask({**request, "out": str(out), "err": str(err)})
        return _Process(self, pid)

    def reap(self, pid: int) -> int:
        """The wait status of a child that has ended."""
        return self._ask({"reap": pid})

    def _ask(self, request: dict[str, Any]) -> int:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return int(self._lines.readline())


class _Process:
    """A child of the zygote, with what `Job` needs of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code if self._code is not None else self._wait(0)

    def wait(self) -> int:
        code = self._code if self._code is not None else self._wait(None)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, timeout_ms: int | None) -> int | None:
        # Until it is reaped, at our request only, the number stays its own.
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(timeout_ms):
                return None
        finally:
            os.close(pidfd)
        self._code = os.waitstatus_to_exitcode(self._zygote.reap(self.pid))
        return self._code


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """The zygote's side, until the test closes the channel. In a child: what it is to become."""
    import outlast.inprocess  # noqa: F401 - what this process is for: torch comes with it

    for name in sys.argv[2:]:
        importlib.import_module(name)

    lines = channel.makefile("r")
    while line := lines.readline():
        request: dict[str, Any] = json.loads(line)
        if "reap" in request:
            channel.sendall(f"{os.waitpid(request['reap'], 0)[1]}\n".encode())
        elif os.fork() == 0:
            os.setsid()  # before the answer: the test may kill the session as soon as it knows it
            channel.sendall(f"{os.getpid()}\n".encode())
            lines.close()
            channel.close()
            return request
    return None


def _become(request: dict[str, Any]) -> None:
    """Makes a child what a fresh interpreter would be."""
    for number, key in ((1, "out"), (2, "err")):
        file = os.open(request[key], os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    _show_in_proc(request["env"][MARKER])
    faulthandler.enable()
    sys.argv = [request["script"], *request["args"]]
    sys.path[0] = str(Path(request["script"]).parent)


def _show_in_proc(job_id: str) -> None:
    """Puts the job's id where `/proc/PID/environ` shows it: that is the memory in which the
    process was given its environment, which later changes of it do not touch.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: see proc_pid_stat(5)
    block = ctypes.string_at(start, end - start)
    at = block.index(f"{MARKER}={_BLANK}".encode()) + len(MARKER) + 1
    ctypes.memmove(start + at, job_id.encode(), len(_BLANK))


if __name__ == "__main__":
    task = _serve(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        _become(task)
        # At the top of the stack, so that an exception ends the process as it always does.
        runpy.run_path(task["script"], run_name="__main__")
