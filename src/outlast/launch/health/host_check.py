"""Checks this host before it takes part in a job: in a child process, with a limit for each check.

The launcher checks before it asks for a place: an unhealthy host is to the others as one that never
came, and a spare was checked before it became one. Nothing is checked when a spare takes a place:
the others would wait for it. The network is checked once it has joined (`hosts.job.neighbors`).

The child process is a program, so that one that hangs can be killed, and its helpers with it:

    python -m outlast.launch.health.host_check SPECIFICATION

SPECIFICATION is a `HealthSpec` or a `Neighbor` as JSON. For each check, a line of JSON on stdout
says that it begins, and another one how it has ended. The first that fails is the last. Standard
input is a pipe of the launcher: when that ends, this process and those that it has started are
killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outlast.errors import HostUnfit
from outlast.launch import environment
from outlast.launch.config.job_spec import HealthSpec, Neighbor
from outlast.system.error_text import exit_text
from outlast.system.parallel import start_thread
from outlast.system.processes import readable
from outlast.system.units import duration_text, size_text

SHM = "/dev/shm"
_BLOCK_BYTES = 1 << 20
_FILE_BYTES = 16 * _BLOCK_BYTES
_MEMORY_BYTES = 64 * _BLOCK_BYTES
_LAST_BYTES = 2000
"""Of the output of the user's command, for the error."""
_KILL_S = 5.0
"""How long a killed process may take to end: one that waits for a broken disk may never do so."""


class CheckProcess:
    """Runs the program, in a group of its own. `variables`: for its environment, besides this
    process's own.
    """

    def __init__(
        self,
        specification: Mapping[str, Any],
        limit_s: float,
        *,
        first: str = "the first check",
        variables: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.figures: list[str] = []
        self._limit_s, self._first, self._began = limit_s, first, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast.launch.health.host_check", json.dumps(specification)],
            env={**environment.checks_environment(), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=fds,
        )

    def failure(self) -> str:
        """Which check has failed, and how; empty if all have passed."""
        stdout = self._process.stdout
        assert stdout is not None
        name, begun, data = self._first, self._began, b""
        while True:
            left_s = begun + self._limit_s - time.monotonic()
            if not readable(stdout.fileno(), timeout=left_s):
                return f"{name} has not ended within {self._limit_s:g} s (--health-timeout)"
            data += (more := os.read(stdout.fileno(), 1 << 16))
            if not more:
                code = self._process.wait()  # 0 also if the agent has reaped it
                return f"{name}: its process {exit_text(code) if code else 'has ended'}"
            *lines, data = data.split(b"\n")
            for report in map(json.loads, lines):
                if "failed" in report:
                    return f"{name}: {report['failed']}"
                if "healthy" in report:
                    return ""
                if "figures" in report:
                    self.figures.append(report["figures"])
                else:
                    name = report["begins"]
                begun = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process and its helpers; `failure` then returns."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill what is left of the process and its helpers; in words if that does not help."""
        self.kill()
        left = ""
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            left = f" (its process {self._process.pid} cannot be killed)"
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return left


def check_host(spec: HealthSpec | None, say: Callable[[str], None]) -> None:
    """Check this host; `None` checks nothing. `say` prints a line. A `HostUnfit` naming the host,
    the check that failed, the figures, and what to do.
    """
    if spec is None:
        return
    host, began = socket.gethostname(), time.monotonic()
    checks = CheckProcess(dataclasses.asdict(spec), spec.limit_s)
    try:
        failure = checks.failure()
    finally:
        left = checks.end()
    if failure:
        raise HostUnfit(
            f"host {host} is not healthy, and runs no ranks: {failure}{left}. Repair the host, or "
            "leave the check out (--health-check, --health-command)"
        )
    took = duration_text(time.monotonic() - began)
    say(f"host {host} is healthy, checked in {took}: {'; '.join(checks.figures)}")


Check = Callable[[], str]
"""Returns the figures, in words. An `OSError` or `RuntimeError` says what is wrong."""


Checks = Iterator[tuple[str, "Check | None"]]
"""Names of checks, and the checks. One without a check is what it takes to list the next."""


def main(specification: str) -> None:
    """Make the checks, and report them; then wait to be killed. The launcher reaps what has ended,
    and the number of this process could be another's by the time it kills this group.
    """
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a check prints is not a report
    launcher = start_thread("launcher", _end_with_launcher)
    spec = json.loads(specification)
    for name, check in _of_neighbor(spec) if "side" in spec else _of_host(spec):
        _report(reports, begins=name)
        if check is None:
            continue
        try:
            figures = check()
        except (OSError, RuntimeError, MemoryError) as e:
            _report(reports, failed=str(e) or repr(e))
            break
        _report(reports, figures=figures)
    else:
        _report(reports, healthy=True)
    launcher.join()


def _report(reports: Any, **line: object) -> None:
    reports.write(json.dumps(line) + "\n")


def _end_with_launcher() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)  # the launcher has made it the leader of its group


def _of_neighbor(spec: dict[str, Any]) -> Checks:
    def check() -> str:
        from outlast.launch.health import device_checks  # it imports torch

        return device_checks.check_neighbor(Neighbor(**spec))

    yield f"the all-reduce with {spec['name']}", check


def _of_host(spec: dict[str, Any]) -> Checks:
    free, folder, command = spec["free_bytes"], spec["folder"], spec["command"]
    if spec["level"] != "off":
        yield "memory", check_memory
        yield SHM, lambda: check_folder(SHM, free)
        yield folder, lambda: check_folder(folder, free)
    if spec["level"] == "full":
        yield "the list of devices", None
        from outlast.launch.health import device_checks  # it imports torch

        for device in device_checks.devices():
            yield device, lambda device=device: device_checks.check_device(device)  # type: ignore[misc]
    if command:
        yield f"--health-command {command}", lambda: run_command(command)


def check_memory() -> str:
    """Copies memory, and compares."""
    block = os.urandom(_BLOCK_BYTES)
    source = block * (_MEMORY_BYTES // _BLOCK_BYTES)
    began = time.monotonic()
    copy = bytearray(source)
    seconds = time.monotonic() - began
    if copy != source:
        raise RuntimeError("a copy of memory differs from its source: the memory is faulty")
    return f"memory copied at {_speed(_MEMORY_BYTES, seconds)}"


def check_folder(folder: str, free_bytes: int) -> str:
    """Writes a file to the storage of `folder`, and reads it from there; no file is left."""
    os.makedirs(folder, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < free_bytes:
        raise RuntimeError(
            f"{size_text(free)} are free, less than the {size_text(free_bytes)} of --health-free"
        )
    data = os.urandom(_FILE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - began
        # So that the bytes come from the storage, and not from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        if file.read() != data:
            raise RuntimeError("a file that was written differs when it is read")
    return f"{folder} written at {_speed(_FILE_BYTES, seconds)}, {size_text(free)} free"


def run_command(command: str) -> str:
    """Runs the user's command: exit code 0 means healthy."""
    # Not a pipe: what the command leaves running would keep it open.
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
        output.seek(max(0, output.tell() - _LAST_BYTES))
        said = output.read().decode(errors="replace").strip()
    if code:
        raise RuntimeError(f"exit code {code}{f', and its last output: {said}' if said else ''}")
    return "the command found it healthy"


def _speed(size_bytes: int, seconds: float) -> str:
    return f"{size_text(int(size_bytes / max(seconds, 1e-9)))}/s"


if __name__ == "__main__":
    main(sys.argv[1])
