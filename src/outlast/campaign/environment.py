"""The machine of a campaign, its environment variables, which no other module of it reads, and the
processes that carry its mark.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

MARK = "OUTLAST_CAMPAIGN"
"""Set in every process of a round, with a value of its own for each job: it finds orphans."""


def job_environment(mark: str, temporary: Path, fired: Path) -> Mapping[str, str]:
    """The environment of the launcher of one job; `mark` identifies its processes."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")},
        MARK: mark,
        "TMPDIR": str(temporary),
        "OUTLAST_CHAOS_STATE": str(fired),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with this mark."""
    found = []
    for process in psutil.process_iter():
        # It has ended, or is another user's.
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap_orphans(mark: str, linger_s: float) -> list[str]:
    """Waits `linger_s` for the processes to end; describes and kills those that do not."""
    deadline = time.monotonic() + linger_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
    described = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            described.append(f"process {process.pid}, {process.status()}: {_command(process)}")
            process.kill()
    psutil.wait_procs(left, timeout=linger_s)
    return described


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error as error:
        return type(error).__name__


def describe() -> str:
    """The processor, its cores, the memory, and the versions."""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {memory}; {versions}"


def processor() -> str:
    """The model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
