"""Describes the machine of a campaign, for its table."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil


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
