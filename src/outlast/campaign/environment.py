"""The machine of a campaign, and its environment variables, which no other module of it reads."""

from __future__ import annotations

import os
import platform
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
