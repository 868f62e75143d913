"""How much memory this host, or this container, has available."""

from __future__ import annotations

from pathlib import Path

import psutil

STANDBY_BYTES = 512 * 1024**2
"""Estimate of the memory of a process that has imported torch and a script's other packages."""

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory that can be used without swapping, and within the limit of the container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # "max" is no limit; version 1 of cgroups has other files
        return available
    return min(available, max(0, limit - used))


def default_standbys(cgroup: Path = _CGROUP) -> int:
    """One standby process, if twice its memory is available; otherwise none."""
    return 1 if available_bytes(cgroup) > 2 * STANDBY_BYTES else 0
