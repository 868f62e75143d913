"""Counts the first causes of the restarts, by kind and by host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from outlast.events import restart_causes
from outlast.events.report.model import Cause, CauseCount, HostCount, Restart
from outlast.events.report.words import one_line
from outlast.events.restart_causes import HOST_LOST, JOINED, RestartCount


def kind_of(cause: Cause) -> str:
    """The name of the interruption, without the name of its enum."""
    return cause.interruption.upper().rpartition(".")[2]


def what_failed(cause: Cause) -> str:
    """A fault of a rank in a few words: the type of an exception and its line, or its kind."""
    message, where = one_line(cause.message), one_line(cause.where)
    return restart_causes.what_failed(kind_of(cause), message, where, cause.exit)


def what_happened(restart: Restart) -> str:
    """The first cause in a few words, without rank and host."""
    if restart.host_loss is not None:
        return HOST_LOST
    if restart.cause is not None:
        return what_failed(restart.cause)
    if restart.lost:
        return "rank lost"
    if restart.joined:
        return JOINED
    return one_line(restart.reason) or "not recorded"


def count_causes(restarts: Iterable[Restart]) -> tuple[CauseCount, ...]:
    """The kinds of first causes, the most frequent first."""
    groups: dict[str, list[Restart]] = {}
    for restart in restarts:
        groups.setdefault(what_happened(restart), []).append(restart)
    counts = [_count(what, group) for what, group in groups.items()]
    return tuple(sorted(counts, key=lambda count: -count.count))


def restarts_in_words(restarts: Iterable[Restart]) -> str:
    """The restarts by cause in one line: "2 restarts: 2 x KeyError at train.py:16 (rank 0)". As the
    ranks themselves count them, which do not know how a process ended.
    """
    counts = []
    for restart in filter(lambda restart: restart.resumed, restarts):
        cause = restart.cause
        if cause is not None and kind_of(cause) == "TERMINATED":
            restart = dataclasses.replace(restart, cause=dataclasses.replace(cause, exit=""))
        ranked = cause or (restart.lost[0] if restart.lost else None)
        counts.append(
            RestartCount.of(what_happened(restart), -1 if ranked is None else ranked.rank)
        )
    return restart_causes.describe_restarts(counts)


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
