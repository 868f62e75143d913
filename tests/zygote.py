"""Starts Python processes by fork, without the seconds that `import torch` takes.

    with Zygote() as zygote, Job(tmp_path, script, spawn=zygote.spawn) as job:
        ...
    with Zygote() as zygote, zygote.start([sys.executable, "-m", "module"], stdout=PIPE) as process:
        ...

A launcher's workers are forked too, with `workers=True`; see `forked_workers.py`.

The zygote is a process that has imported torch and outlast and done nothing with them. On request
it forks, and the child becomes what a fresh interpreter with the same command line would be: its
own session, environment, working directory, output and `sys.argv`, and then the script or module as
`__main__`. The zygote is the parent of its children, and reports their exit codes. Differences from
a fresh interpreter: modules are already imported, /proc shows the command line of the zygote, and
the end leaves out most of the destructors that release what ends with the process anyway. The
zygote itself is in `zygote_process.py`.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import forked_workers
import zygote_process
from procs import default_signals
from zygote_process import BLANK

IMPORTS = (
    "outlast.async_checkpoint",
    "outlast.chaos",
    "outlast.elastic",
    "outlast.inprocess",
    "outlast.launch.cli",
    # Modules that torch imports on use: by an optimizer's first step, a DTensor, `dcp.load`.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
)

_shared: list[Zygote] = []


def shared() -> Zygote:
    """The zygote of the session, for tests that ask for the fixture of that name."""
    return _shared[0]


def is_shared() -> bool:
    """Whether there is one: programs of tests, which use their code, have none."""
    return bool(_shared)


class Zygote:
    """The test's side: one request at a time, each answered at once.

    Args:
        imports: modules that its children have from the beginning.
    """

    def __init__(self, imports: Sequence[str] = IMPORTS) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "BLANK": BLANK,
            "OMP_NUM_THREADS": "1",  # no thread pool: its threads would not exist after a fork
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, zygote_process.__file__, str(theirs.fileno()), *imports],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        self._socket = ours
        self._lines = ours.makefile("r")

    def share(self) -> None:
        """Makes this the zygote that `shared` returns, until it ends."""
        _shared[:] = [self]

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        if _shared == [self]:
            _shared.clear()
        self._lines.close()
        self._socket.close()
        self._process.kill()  # it may still be importing
        self._process.wait()

    def spawn(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        out: Path,
        err: Path,
        workers: bool = False,
    ) -> Started:
        """Starts a process with its output in two files, as `Job` requires."""
        with out.open("wb") as out_file, err.open("wb") as err_file:
            ends = {"stdout": out_file.fileno(), "stderr": err_file.fileno()}
            return self.start(command, env, workers=workers, **ends)

    @property
    def launch(self) -> Callable[..., Started]:
        """`spawn`, for a launcher whose workers are forked too."""
        return functools.partial(self.spawn, workers=True)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        workers: bool = False,
        host: int = 0,
    ) -> Started:
        """Starts `python script args...` or `python -m module args...`, like `subprocess.Popen`.

        Args:
            stdout: a descriptor, or `subprocess.PIPE`.
            stderr: a descriptor, or `subprocess.PIPE`.
            workers: whether it is a launcher whose workers are forked too.
            host: the first process of the host on which it is to run; see `namespaces.py`.
        """
        streams: list[IO[bytes] | None] = []
        ends: list[int] = []  # the child's
        mine: list[int] = []  # the ends to be closed here
        for stream in (stdout, stderr):
            if stream != subprocess.PIPE:
                streams.append(None)
                ends.append(stream)
                continue
            read, write = os.pipe()
            streams.append(open(read, "rb"))  # noqa: SIM115 - `Started` closes it
            ends.append(write)
            mine.append(write)
        request = {
            "command": list(command[1:]),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "workers": workers,
            "host": host,
        }
        try:
            pid = self._ask(request, ends)
        finally:
            for end in mine:
                os.close(end)
        return Started(self, pid, command, *streams)

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
        workers: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run`, with the output as text."""
        with self.start(command, env, cwd, workers=workers) as process:
            out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(command, process.wait(), out, err)

    def reap(self, pid: int) -> int:
        """The wait status of a child that has ended."""
        return self._ask({"reap": pid})

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        forked_workers.send(self._socket, request, descriptors)
        return int(self._lines.readline())


class Started:
    """A child of the zygote, with the part of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        zygote: Zygote,
        pid: int,
        command: Sequence[str],
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
    ) -> None:
        self.pid = pid
        self.args = command
        self.stdout = stdout
        self.stderr = stderr
        self._zygote = zygote
        self._code: int | None = None

    def __enter__(self) -> Started:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.kill()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        return self._code if self._code is not None else self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code if self._code is not None else self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output as text, until both streams are closed."""
        texts = {"out": b"", "err": b""}

        def read(name: str, stream: IO[bytes] | None) -> None:
            texts[name] = stream.read() if stream is not None else b""

        readers = [
            threading.Thread(target=read, args=("out", self.stdout)),
            threading.Thread(target=read, args=("err", self.stderr)),
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        finally:
            for reader in readers:
                reader.join()
        return texts["out"].decode(), texts["err"].decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        # The pid cannot be reused until it is reaped, which happens only on our request.
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                return None
        finally:
            os.close(pidfd)
        self._code = os.waitstatus_to_exitcode(self._zygote.reap(self.pid))
        return self._code
