"""The options for the health of a host, checked, and the specifications of the checks."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the checks import this module, and have no options
    from outlast.launch.config.options import RunOptions

LEVELS = ("off", "quick", "full")
_FREE_GB = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """What is checked before this host takes part in the job."""

    level: str  # one of `LEVELS`; with `off` the command alone
    folder: str  # a file is written in it, and read
    free_bytes: int  # how much must be free there and in shared memory
    command: str  # of the user, for a shell; empty for none
    limit_s: float  # how long each check may take

    @property
    def checks_neighbors(self) -> bool:
        """Whether the network is checked too, in a job on several hosts."""
        return self.level == "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbor:
    """The other host of a pair, and how this one meets it."""

    name: str
    key: str  # of the pair in the store: a host has one port for all of its checks
    side: int  # 0 for the host that serves the store, at `address` and `port`; 1 for the other one
    address: str
    port: int
    fd: int  # the listening socket, on side 0
    devices: bool  # whether the accelerators take part
    limit_s: float  # how long it may take
    # of the device of this rank, and how many ranks each host has; empty to find out
    kind: str = ""
    rank: int = 0  # of this process among those of its host


def health_from_options(options: RunOptions) -> HealthSpec | None:
    """What to check; `None` for nothing. A `ValueError` names the option."""
    level, limit_s = options.health_check, options.health_timeout
    free = _FREE_GB if options.health_free is None else options.health_free
    if level not in LEVELS:
        raise ValueError(f"--health-check {level}: must be off, quick or full")
    if not math.isfinite(free) or free < 0:
        raise ValueError(f"--health-free {free:g}: must be a number of GB, at least 0")
    if not math.isfinite(limit_s) or limit_s <= 0:
        raise ValueError(f"--health-timeout {limit_s:g}: must be a positive number of seconds")
    for name in ("health_folder", "health_free") if level == "off" else ():
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: no folder is checked without --health-check quick")
    if level == "off" and options.health_command is None:
        return None
    if options.health_command is not None and not options.health_command.strip():
        raise ValueError("--health-command: must not be empty")
    folder = options.health_folder or options.log_dir or options.events_dir
    return HealthSpec(
        level=level,
        folder=str(Path(folder or tempfile.gettempdir()).absolute()),
        free_bytes=int(free * 1e9),
        command=options.health_command or "",
        limit_s=limit_s,
    )
