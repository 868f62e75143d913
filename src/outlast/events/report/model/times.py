"""What the wall time of each host was used for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartParts:
    """What the time outside the function was used for, in seconds. The parts add up.

    Attributes:
        detection, abort, leave, clean_up, replacements, entry: as in `Recovery`, over all restarts.
        uneven: ranks entered the function at different times at the start, or left it at different
            times at the end.
    """

    detection: float
    abort: float
    leave: float
    clean_up: float
    replacements: float
    entry: float
    uneven: float


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """The wall time of a host that advanced nothing, in seconds, by its first reason.
    `replacements` and `restart_parts` are parts of `restart`; all others add up.

    Attributes:
        restart: not every active rank of the host was in the function, or the host knew of a fault.
        replacements: the part of `restart` in which the restart waited for replacements.
        restart_parts: all parts of `restart`.
        hang: from the last progress of hung ranks, or of a lost host, to the end of the iteration.
        setup: from the entry into the function to the end of the restore.
        saves: `save` blocked training.
        redone: the resulting state was discarded, since a later restore went back further.
        reduced: the share of the ranks that the job lacked, of the rest.
    """

    restart: float
    replacements: float
    hang: float
    setup: float
    saves: float
    redone: float
    reduced: float
    restart_parts: RestartParts


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Wall time and productive time of one host.

    Attributes:
        wall_seconds: from the first entry into the function to the end, summed over the calls.
        productive_seconds: the wall time without the lost time.
        goodput: productive time divided by wall time; `None` without wall time.
        start_seconds: from the start of the first process to the first entry into the function,
            which is before the wall time; `None` if the launcher did not record it.
    """

    host: str
    wall_seconds: float
    productive_seconds: float
    goodput: float | None
    lost: LostTime
    start_seconds: float | None = None
