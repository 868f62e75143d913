"""The causes of restarts in words, for the wrapper's log, the launcher's last lines, the report and
`top`: "3 restarts: 2 x KeyError at train.py:16 (rank 0), 1 x died (rank 3)".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

JOINED, HOST_LOST, DIED = "new ranks joined", "host lost", "died"
MOVED = "moved"
"""No fault: ranks have left at the end of a step, and others have their places."""


class Interruption(str, enum.Enum):
    """Kinds of interruption.

    * `EXCEPTION`: an `Exception` in the function or in `initialize`.
    * `BASE_EXCEPTION`: the rank left with a `BaseException`, or with an error in its cleanup.
    * `SOFT_TIMEOUT`, `HARD_TIMEOUT`: no progress; the hard timeout terminated the process.
    * `TERMINATED`: the process ended without a report (killed or crashed).
    * `UNRESPONSIVE`: no heartbeat from the rank.
    """

    EXCEPTION = "EXCEPTION"
    BASE_EXCEPTION = "BASE_EXCEPTION"
    SOFT_TIMEOUT = "SOFT_TIMEOUT"
    HARD_TIMEOUT = "HARD_TIMEOUT"
    TERMINATED = "TERMINATED"
    UNRESPONSIVE = "UNRESPONSIVE"


HUNG = Interruption.SOFT_TIMEOUT
"""The interruption that reports a rank without progress."""
HANGS = (HUNG, Interruption.HARD_TIMEOUT)
"""Kinds of faults that are a lack of progress."""

_IN_SHORT: dict[str, str] = {
    Interruption.SOFT_TIMEOUT: "no progress",
    Interruption.HARD_TIMEOUT: "no progress",
    Interruption.TERMINATED: DIED,
    Interruption.UNRESPONSIVE: "no heartbeat",
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
    if found is None:
        return None
    return found["hook"] or "", found["type"], text[found.end() :]


def what_failed(interruption: str, message: str, where: str, exit_: str = "") -> str:
    """A fault in a few words: `KeyError at train.py:16`, `died`, `killed by SIGKILL`.

    Args:
        interruption: the value of an `Interruption`, or `WORKER_FAILED`.
        message: the first line of the fault's message.
        where: the user's line that raised it, `train.py:16 in step`; empty if there is none.
        exit_: how the process ended, if the launcher knows it.
    """
    if interruption in HANGS:
        return _IN_SHORT[HUNG]
    if interruption == Interruption.TERMINATED and message.startswith("host "):
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
    ranked = sorted(found.values(), key=lambda each: each.count, reverse=True)
    ranked.sort(key=lambda each: each.what == _OTHERS)
    if len(ranked) > _CAUSES:
        rest = ranked[_CAUSES - 1 :]
        ranked[_CAUSES - 1 :] = [RestartCount(_OTHERS, sum(each.count for each in rest))]
    return tuple(ranked)


def describe_restarts(counts: Iterable[RestartCount]) -> str:
    """The counts in words; empty without restarts."""
    totals = add_up(counts)
    moves = sum(each.count for each in totals if each.what == MOVED)
    totals = tuple(each for each in totals if each.what != MOVED)
    number = sum(each.count for each in totals)
    causes = ", ".join(f"{each.count} x {each.what}{_on(each.ranks)}" for each in totals)
    restarts = f"{number} restart{'' if number == 1 else 's'}: {causes}" if number else ""
    moved = f"{moves} move{'' if moves == 1 else 's'}" if moves else ""
    return " and ".join(filter(None, (moved, restarts)))


def _on(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    named = [str(rank) for rank in ranks[:_RANKS]]
    more = [f"{len(ranks) - _RANKS} more"] if len(ranks) > _RANKS else []
    return f" (rank{'' if len(ranks) == 1 else 's'} {', '.join([*named, *more])})"
