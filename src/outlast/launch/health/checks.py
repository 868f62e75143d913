"""The checks of a host; a program, so that one that hangs can be killed, and its helpers with it.

    python -m outlast.launch.health.checks SPECIFICATION

SPECIFICATION is a `HealthSpec` or a `Neighbor` as JSON. For each check, a line of JSON on stdout
says that it begins, and another one how it has ended. The first that fails is the last. Standard
input is a pipe of the launcher: when that ends, this process and those that it has started are
killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from outlast.launch.config.health_spec import Neighbor
from outlast.system.units import size_text

SHM = "/dev/shm"
_BLOCK_BYTES = 1 << 20
_FILE_BYTES = 16 * _BLOCK_BYTES
_MEMORY_BYTES = 64 * _BLOCK_BYTES
_LAST_BYTES = 2000
"""Of the output of the user's command, for the error."""

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
    launcher = threading.Thread(target=_end_with_launcher, name="launcher", daemon=True)
    launcher.start()
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
