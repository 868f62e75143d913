"""Real rank processes for tests, each in its own session, none left over afterwards.

    with Job(tmp_path, script, nprocs=4) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: line.get("event") == "training")
        job.kill(2)
        job.start(2)                       # a new process in its place
        assert set(job.wait_all().values()) == {0}
        assert job.lines(3)[-1]["step"] == 100

A script prints JSON objects, one per line; other lines are ignored. Every process has the job's id
in its environment, including children in other sessions, so the end of the block finds them all.
Every time limit here is a safety net, not a measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

MARKER = "OUTLAST_TEST_ID"
NET_S = 120.0
"""How long a test waits for an event; below pytest's own limit, so that the job cleans up."""
LINGER_S = 15.0
"""How long helpers of a rank, such as its monitor, may take to end after it."""

Line = dict[str, Any]

_given_ports: set[int] = set()


class Process(Protocol):
    """The interface of a started process that a job needs; `subprocess.Popen` implements it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


def spawn(command: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Process:
    """Starts a process in its own session, with its output in two files."""
    with out.open("wb") as out_file, err.open("wb") as err_file:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
            preexec_fn=default_signals,
        )


def default_signals() -> None:
    """For a new process: a test runner in the background may pass on ignored SIGINT and SIGHUP,
    which a program then leaves ignored.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def free_port() -> int:
    """A free port of 127.0.0.1 that was not returned before.

    It is below the range of ephemeral ports, so that no outgoing connection takes it before the
    job's store does. Each worker of pytest-xdist has a separate range.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(15_000 + worker % 16 * 1000, 16_000 + worker % 16 * 1000)
    for port in random.SystemRandom().sample(ports, len(ports)):
        if port in _given_ports:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_ports.add(port)
        return port
    raise RuntimeError("no free port")


class Job:
    """The processes of one job on this machine, started from one script."""

    def __init__(
        self,
        tmp_path: Path,
        script: Path | str,
        nprocs: int = 4,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        spawn: Callable[[Sequence[str], Mapping[str, str], Path, Path], Process] = spawn,
    ) -> None:
        self._spawn = spawn
        self.id = uuid.uuid4().hex
        self.nprocs = nprocs
        self.port = free_port()
        self._folder = tmp_path / f"job-{self.id[:8]}"
        self._folder.mkdir(parents=True)
        self._command = [sys.executable, str(script), *args]
        self._env = dict(env or {})
        self._started: dict[int, list[Process]] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for attempts in self._started.values():
            for process in attempts:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # it leads its session
                process.wait()
        left = self._reap_leftovers()
        if left and error is None:
            self._fail("processes outlived their job:\n" + "\n".join(left))
        if error is None:
            for rank in self._started:
                assert not (noise := torch_noise(self.errors(rank))), f"rank {rank}:\n{noise}"

    # ------------------------------------------------------------------ starting and ending

    def start(self, rank: int, env: Mapping[str, str] | None = None) -> Process:
        """Starts `rank`, or restarts it after its process has ended."""
        attempts = self._started.setdefault(rank, [])
        assert not attempts or attempts[-1].poll() is not None, f"rank {rank} is still running"
        process = self._spawn(
            self._command,
            self._environment(rank) | dict(env or {}),
            self._file(rank, len(attempts), "out"),
            self._file(rank, len(attempts), "err"),
        )
        attempts.append(process)
        return process

    def start_all(self) -> None:
        """Starts every rank, 0 to `nprocs` - 1."""
        for rank in range(self.nprocs):
            self.start(rank)

    def pid(self, rank: int) -> int:
        """The process id of the rank's latest process."""
        return self._latest(rank).pid

    def running(self, rank: int) -> bool:
        """Whether the rank's latest process has not ended."""
        return self._latest(rank).poll() is None

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to the rank's latest process."""
        self._latest(rank).send_signal(number)

    def kill(self, rank: int) -> None:
        """Kills the rank's latest process, and waits for its end."""
        self.send(rank, signal.SIGKILL)
        self.wait(rank)

    # ------------------------------------------------------------------------------ waiting

    def wait(self, rank: int, timeout: float = NET_S) -> int:
        """The exit code of the rank's latest process, once it has ended."""
        return self._wait(rank, time.monotonic() + timeout)

    def wait_all(self, timeout: float = NET_S) -> dict[int, int]:
        """The exit code of every rank's latest process, once all have ended."""
        deadline = time.monotonic() + timeout
        return {rank: self._wait(rank, deadline) for rank in sorted(self._started)}

    def wait_for_line(
        self, rank: int, predicate: Callable[[Line], object], timeout: float = NET_S
    ) -> Line:
        """The first JSON line of `rank` that `predicate` accepts, as soon as it is printed.

        Lines that were printed before the call count too. A rank that ends without such a line
        fails the test at once.
        """
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            ended = not self.running(rank)  # checked first, so that its last output is read below
            lines = self.lines(rank)
            for line in lines[seen:]:
                if predicate(line):
                    return line
            seen = len(lines)
            if ended:
                self._fail(f"rank {rank} ended without the line waited for")
            if time.monotonic() > deadline:
                self._fail(f"rank {rank} has not printed the line waited for in {timeout} s")
            time.sleep(0.005)

    # ------------------------------------------------------------------------------ reading

    def output(self, rank: int) -> str:
        """The rank's stdout so far, over all its processes in order."""
        return self._read(rank, "out")

    def errors(self, rank: int) -> str:
        """The rank's stderr so far, over all its processes in order."""
        return self._read(rank, "err")

    def lines(self, rank: int) -> list[Line]:
        """The JSON objects that the rank has printed so far, one per line."""
        whole = (line for line in self.output(rank).splitlines(keepends=True) if line[-1] == "\n")
        return [json.loads(line) for line in whole if line.startswith("{")]

    def end_writers(self, host: str) -> None:
        """Kills what keeps memory of ended ranks on the host with this name (`OUTLAST_HOST`)."""
        for process in marked(self.id):
            with contextlib.suppress(psutil.Error):
                is_writer = "outlast.async_checkpoint.writer.main" in process.cmdline()
                if is_writer and process.environ().get("OUTLAST_HOST") == host:
                    process.kill()

    # ------------------------------------------------------------------------------ private

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            **self._env,
            MARKER: self.id,
        }

    def _file(self, rank: int, attempt: int, kind: str) -> Path:
        return self._folder / f"rank{rank}.{attempt}.{kind}"

    def _latest(self, rank: int) -> Process:
        return self._started[rank][-1]

    def _read(self, rank: int, kind: str) -> str:
        return "".join(
            self._file(rank, attempt, kind).read_text(errors="replace")
            for attempt in range(len(self._started[rank]))
        )

    def _wait(self, rank: int, deadline: float) -> int:
        process = self._latest(rank)
        if not _ended(process, deadline):
            # Every rank's fault handler prints all stacks before the process dies of this signal.
            for other in self._started:
                if self.running(other):
                    self.send(other, signal.SIGABRT)
            _ended(process, time.monotonic() + LINGER_S)
            self._fail(f"rank {rank} was still running at the end of the time it had")
        return process.wait()

    def _fail(self, why: str) -> None:
        parts = [why]
        for rank in sorted(self._started):
            code = self._latest(rank).poll()
            for title, text in (("out", self.output(rank)), ("err", self.errors(rank))):
                parts.append(f"---- rank {rank}, exit code {code}, {title}:\n{text[-4000:]}")
        raise AssertionError("\n".join(parts))

    def _reap_leftovers(self) -> list[str]:
        """Waits for the helpers of ended ranks to end; kills and describes those that do not."""
        deadline = time.monotonic() + LINGER_S
        while (left := marked(self.id)) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
        described = []
        for process in left:
            described.append(_describe(process))
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=LINGER_S)
        return described


def torch_noise(output: str) -> str:
    """The lines of torch's C++ log in the output of a process: none, whatever the fault was."""
    prefixes = r"^(\[\d+\] )?(\[rank\d+\]:)?"  # of the launcher, of torch
    signs = re.compile(prefixes + r"(\[[WE]\d{4} .*\.(cpp|cc|hpp):\d+\] |frame #\d+: )")
    # Not about faults: where no resolver answers, every connection of torch's may say so; DDP's
    # advice about the script's model. And what is logged before the rank knows of a fault: a peer
    # failed while gloo was still connecting to it, or hung up while the store's server answered.
    # Groups and timers of a device that torch does not know.
    others = (
        "The hostname of the client socket cannot be retrieved",
        "reducer.cpp",
        "logger.cpp",
        "Gloo connectFullMesh failed",
        "Write setup to client failed",
        "No backend of type 0 found for Process Group",
    )
    lines = [line for line in output.splitlines() if signs.search(line)]
    return "\n".join(line for line in lines if not any(other in line for other in others))


def marked(job_id: str) -> list[psutil.Process]:
    """The live processes that have a job's id."""
    found = []
    for process in psutil.process_iter():
        try:
            carried = process.environ().get(MARKER)
            if carried == job_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return found


def _ended(process: Process, deadline: float) -> bool:
    """Waits on a pidfd for the end of a process, until `deadline`."""
    if process.poll() is not None:
        return True
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    finally:
        os.close(pidfd)


def _describe(process: psutil.Process) -> str:
    try:
        return f"  - {process.pid}, {process.status()}: {process.cmdline()}"
    except psutil.Error as error:
        return f"  - {process.pid}, {type(error).__name__}"
