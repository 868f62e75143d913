"""The causes of restarts: which of several hung ranks the others waited for, and the words of the
wrapper's log, the launcher's last lines, the report and `top`: "3 restarts: 2 x KeyError at
train.py:16 (rank 0), 1 x died (rank 3)".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

JOINED, HOST_LOST, DIED = "new ranks joined", "host lost", "died"
HUNG = "SOFT_TIMEOUT"
"""The interruption that reports a rank without progress."""
HANGS = (HUNG, "HARD_TIMEOUT")
"""Kinds of faults that are a lack of progress."""

_IN_SHORT = {
    "SOFT_TIMEOUT": "no progress",
    "HARD_TIMEOUT": "no progress",
    "TERMINATED": DIED,
    "UNRESPONSIVE": "no heartbeat",
}
_EXCEPTION = re.compile(r"(?P<hook>[a-z_]+: )?(?P<type>[A-Za-z_][\w.]*)(?=:|$)")
_PLACE = re.compile(r"(?P<line>.+:\d+)(?: in .*)?")
_CAUSES, _RANKS = 16, 8  # named; the others are only counted
_OTHERS = "other causes"


@dataclass(frozen=True)
class RestartCount:
    """The number of restarts with the same cause, and the ranks on which it was, sorted."""

    what: str
    count: int = 1
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: str, rank: int) -> RestartCount:
        """One restart; `rank` is -1 if the cause was on no single rank."""
        return cls(what, 1, (rank,) if rank >= 0 and what != HOST_LOST else ())


def split_exception(text: str) -> tuple[str, str, str] | None:
    """The hook that raised an exception (`initialize: `, or empty), its type with its module, and
    what follows (`: its message`); `None` if the text does not begin like an exception.
    """
    found = _EXCEPTION.match(text)
    return found and (found["hook"] or "", found["type"], text[found.end() :])


def what_failed(interruption: str, message: str, where: str, exit_: str = "") -> str:
    """A fault in a few words: `KeyError at train.py:16`, `died`, `killed by SIGKILL`.

    Args:
        interruption: a name of `outlast.inprocess.attribution.Interruption`, or `WORKER_FAILED`.
        message: the first line of the fault's message.
        where: the user's line that raised it, `train.py:16 in step`; empty if there is none.
        exit_: how the process ended, if the launcher knows it.
    """
    if interruption in HANGS:
        return _IN_SHORT[interruption]
    if interruption == "TERMINATED" and message.startswith("host "):
        return HOST_LOST
    error = split_exception(message)
    if exit_ and (exit_.startswith("killed") or error is None):
        return exit_
    if interruption in _IN_SHORT or error is None:
        return _IN_SHORT.get(interruption, "failed")
    place = _PLACE.fullmatch(where)
    return error[1] if place is None else f"{error[1]} at {place['line']}"


def add_up(counts: Iterable[RestartCount]) -> tuple[RestartCount, ...]:
    """One count for each cause, the most frequent first; the rarest of very many are one."""
    found: dict[str, RestartCount] = {}
    for each in counts:
        before = found.get(each.what, RestartCount(each.what, 0))
        ranks = sorted({*before.ranks, *each.ranks})
        found[each.what] = RestartCount(each.what, before.count + each.count, tuple(ranks))
    ranked = sorted(found.values(), key=lambda each: (each.what == _OTHERS, -each.count))
    if len(ranked) > _CAUSES:
        rest = ranked[_CAUSES - 1 :]
        ranked[_CAUSES - 1 :] = [RestartCount(_OTHERS, sum(each.count for each in rest))]
    return tuple(ranked)


def describe_restarts(counts: Iterable[RestartCount]) -> str:
    """The counts in words; empty without restarts."""
    totals = add_up(counts)
    number = sum(each.count for each in totals)
    if not number:
        return ""
    causes = ", ".join(f"{each.count} x {each.what}{_on(each.ranks)}" for each in totals)
    return f"{number} restart{'' if number == 1 else 's'}: {causes}"


def _on(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    named = [str(rank) for rank in ranks[:_RANKS]]
    more = [f"{len(ranks) - _RANKS} more"] if len(ranks) > _RANKS else []
    return f" (rank{'' if len(ranks) == 1 else 's'} {', '.join([*named, *more])})"


class HungFault(Protocol):
    """The fields of a fault that describe a hung rank. `collectives` is -1 if unknown."""

    @property
    def member(self) -> int: ...
    @property
    def interruption(self) -> str: ...
    @property
    def consequence(self) -> bool: ...
    @property
    def own_report(self) -> bool: ...
    @property
    def pings(self) -> int: ...
    @property
    def collectives(self) -> int: ...


T = TypeVar("T", bound=HungFault)


def hung_ranks(faults: Sequence[T]) -> list[T]:
    """The hung ranks among `faults`, one fault each, the likely cause first.

    When one rank hangs, the others soon stop as well, in a collective that waits for that rank.
    Since a soft timeout adapts to each rank's pace, the timeout of a waiting rank may well expire
    first. Therefore every rank that stopped reports its own state, which replaces its monitor's
    report, in whichever order they arrived. The reports together show the cause:

    * a rank found inside torch, where it waits for other ranks, waits for one of the rest; so does
      a rank woken up by the end of a connection: it is marked as a consequence;
    * among the rest, a rank that has started more collectives than another waits for that other
      rank (for a result that its device is to produce, for example): it is marked too;
    * among those left, the rank with the fewest pings is the furthest behind.
    """
    reported: dict[int, T] = {}
    echoed: set[int] = set()
    for fault in faults:
        known = reported.get(fault.member)
        if fault.interruption != HUNG:
            echoed |= {fault.member} if fault.consequence else set()
        elif known is None or fault.own_report or not known.own_report:
            reported[fault.member] = fault
    waiting = echoed | {member for member, fault in reported.items() if fault.consequence}
    counts = {
        member: fault.collectives
        for member, fault in reported.items()
        if member not in waiting and fault.collectives >= 0
    }
    waiting |= {member for member, count in counts.items() if count > min(counts.values())}
    for member in waiting & reported.keys():
        waiter: Any = reported[member]
        reported[member] = dataclasses.replace(waiter, consequence=True)
    return sorted(reported.values(), key=lambda fault: (fault.consequence, fault.pings))
