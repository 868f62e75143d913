"""Counts the first causes of the restarts, by kind and by host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from outlast.events.report.model import Cause, CauseCount, HostCount, Restart
from outlast.events.report.words import one_line

_IN_SHORT = {
    "SOFT_TIMEOUT": "no progress",
    "HARD_TIMEOUT": "no progress",
    "TERMINATED": "died",
    "UNRESPONSIVE": "no heartbeat",
}
_HANGS = ("SOFT_TIMEOUT", "HARD_TIMEOUT")
"""Kinds of faults that are a lack of progress: the signal that ended the process came after it, in
most cases from its own monitor process.
"""

_EXCEPTION = re.compile(r"(?:[a-z_]+: )?(?P<type>[A-Za-z_][\w.]*)(?=:|$)")
"""The type of an exception at the beginning of a message, after "initialize: "."""


def kind_of(cause: Cause) -> str:
    """The name of the interruption, without the name of its enum."""
    return cause.interruption.upper().rpartition(".")[2]


def what_failed(cause: Cause) -> str:
    """A fault of a rank in a few words: the type of an exception, a signal, or its kind."""
    error = _EXCEPTION.match(one_line(cause.message))
    if kind_of(cause) in _HANGS:
        return _IN_SHORT[kind_of(cause)]
    what = _IN_SHORT.get(kind_of(cause)) or (error["type"] if error is not None else "failed")
    if cause.exit and (cause.exit.startswith("killed") or error is None):
        what = cause.exit
    return what


def what_happened(restart: Restart) -> str:
    """The first cause in a few words, without rank and host."""
    if restart.host_loss is not None:
        return "host lost"
    if restart.cause is not None:
        return what_failed(restart.cause)
    if restart.lost:
        return "rank lost"
    if restart.joined:
        return "new ranks joined"
    return one_line(restart.reason) or "not recorded"


def count_causes(restarts: Iterable[Restart]) -> tuple[CauseCount, ...]:
    """The kinds of first causes, the most frequent first."""
    groups: dict[str, list[Restart]] = {}
    for restart in restarts:
        groups.setdefault(what_happened(restart), []).append(restart)
    counts = [_count(what, group) for what, group in groups.items()]
    return tuple(sorted(counts, key=lambda count: -count.count))


def count_hosts(restarts: Iterable[Restart]) -> tuple[HostCount, ...]:
    """The hosts of first causes, the most frequent first."""
    found: dict[str, Counter[str]] = {}
    for restart in restarts:
        if host := _host(restart):
            found.setdefault(host, Counter())[what_happened(restart)] += 1
    counts = [
        HostCount(host=host, count=kinds.total(), causes=tuple(kinds.most_common()))
        for host, kinds in found.items()
    ]
    return tuple(sorted(counts, key=lambda count: (-count.count, count.host)))


def _count(what: str, restarts: Sequence[Restart]) -> CauseCount:
    redone = [restart.redone_steps for restart in restarts]
    known = [steps for steps in redone if steps is not None]
    return CauseCount(
        what=what,
        count=len(restarts),
        where=tuple(Counter(filter(None, map(_where, restarts))).most_common()),
        recovery_seconds=sum(restart.phases.total or 0.0 for restart in restarts),
        redone_steps=sum(known) if len(known) == len(redone) else None,
    )


def _host(restart: Restart) -> str:
    if restart.host_loss is not None:
        return restart.host_loss.name
    if restart.cause is not None:
        return restart.cause.host
    return restart.lost[0].host if restart.lost else ""


def _where(restart: Restart) -> str:
    if restart.host_loss is not None:
        return restart.host_loss.name
    ranked = restart.cause or (restart.lost[0] if restart.lost else None)
    return "" if ranked is None else f"rank {ranked.rank} on {ranked.host}"
