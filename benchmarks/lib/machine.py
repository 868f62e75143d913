"""Describes the machine of a measurement: processor, memory, and package versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil

from outlast.campaign.environment import processor

__all__ = ["describe"]

_PACKAGES = ("outlast", "torch", "nvidia-resiliency-ext")


def describe() -> dict[str, str]:
    """The machine and the versions, by name."""
    facts = {
        "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts
