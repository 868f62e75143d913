"""What happened in a few words, and the first causes of the restarts by kind and by host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outlast.events import restart_causes
from outlast.events.report.model import Cause, Restart
from outlast.events.report.report import CauseCount, HostCount
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
    return JOINED if restart.joined else one_line(restart.reason) or "not recorded"


def cause_text(restart: Restart) -> str:
    """The first cause in a few words, with its rank or host."""
    if restart.host_loss is not None:
        return f"host {one_line(restart.host_loss.name)}: lost"
    if restart.cause is None and restart.lost:
        return f"rank {restart.lost[0].rank}: lost"
    rank = "" if restart.cause is None else f"rank {restart.cause.rank}: "
    return rank + what_happened(restart)


def restarts_in_words(restarts: Iterable[Restart]) -> str:
    """The restarts by cause in one line: "2 restarts: 2 x KeyError at train.py:16 (rank 0)"."""
    return restart_causes.describe_restarts(
        RestartCount.of(what_happened(restart), _place(restart)[0])
        for restart in restarts
        if restart.resumed
    )


def count_causes(restarts: Sequence[Restart]) -> tuple[CauseCount, ...]:
    """The kinds of first causes, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for number, restart in enumerate(restarts):
        groups.setdefault(what_happened(restart), []).append(number)
    counts = []
    for what, numbers in groups.items():
        group = [restarts[number] for number in numbers]
        known = [r.redone_steps for r in group if r.redone_steps is not None]
        count = CauseCount(
            what=what,
            count=len(group),
            where=tuple(Counter(filter(None, map(_where, group))).most_common()),
            recovery_seconds=sum(restart.phases.total or 0.0 for restart in group),
            redone_steps=sum(known) if len(known) == len(group) else None,
            restarts=tuple(numbers),
        )
        counts.append(count)
    return tuple(sorted(counts, key=lambda count: -count.count))


def count_hosts(restarts: Iterable[Restart]) -> tuple[HostCount, ...]:
    """The hosts of first causes, the most frequent first."""
    found: dict[str, Counter[str]] = {}
    for restart in restarts:
        if host := _place(restart)[1]:
            found.setdefault(host, Counter())[what_happened(restart)] += 1
    counts = [
        HostCount(host=host, count=kinds.total(), causes=tuple(kinds.most_common()))
        for host, kinds in found.items()
    ]
    return tuple(sorted(counts, key=lambda count: (-count.count, count.host)))


def _place(restart: Restart) -> tuple[int, str]:
    """Rank and host of the first cause; -1 and an empty text if there is none."""
    if restart.host_loss is not None:
        return -1, restart.host_loss.name
    ranked = restart.cause or next(iter(restart.lost), None)
    return (-1, "") if ranked is None else (ranked.rank, ranked.host)


def _where(restart: Restart) -> str:
    rank, host = _place(restart)
    return host if rank < 0 else f"rank {rank} on {host}"
