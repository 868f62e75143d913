"""Which of several hung ranks the others waited for, and in which collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.events.restart_causes import HUNG

if TYPE_CHECKING:
    from outlast.coordination.records import FaultRecord
    from outlast.events.types import Fault

UNJOINED = "; it has begun "
"""Begins what `hung_ranks` adds to the cause of a rank that others wait for."""
_MIXED = "; collective "

T = TypeVar("T", bound="Fault | FaultRecord")
"""Of both: `collectives` is -1 if unknown; `groups` are those of `interruption.flight_recorder`."""


def without_collectives(cause: str) -> str:
    """The cause as the rank itself reported it."""
    return cause.partition(UNJOINED)[0].partition(_MIXED)[0]


def hung_ranks(faults: Sequence[T]) -> list[T]:
    """The hung ranks among `faults`, one fault each, the likely cause first.

    When one rank hangs, the others soon stop as well, in a collective that waits for that rank.
    Since a soft timeout adapts to each rank's pace, the timeout of a waiting rank may well expire
    first. Therefore every rank that stopped reports its own state, which replaces its monitor's
    report, in whichever order they arrived. The reports together show the cause:

    * a rank that has begun a collective last that another rank of the group has not begun waits for
      that other rank. Two ranks may wait for each other, in collectives of different groups;
    * a rank found where it waits for other ranks, inside torch or this package, waits for one of
      the rest; so does a rank woken up by the end of a connection: it is marked as a consequence;
    * among the rest, a rank that has started more collectives than another waits for that other
      rank (for a result that its device is to produce, for example): it is marked too;
    * among those left, a rank that reports nothing itself is stopped, or keeps the GIL; otherwise
      the rank with the fewest pings is the furthest behind.

    To the cause of a rank that others wait for is added in which collective they do.
    """
    reported: dict[int, T] = {}
    echoed: set[int] = set()
    for fault in faults:
        known = reported.get(fault.member)
        if fault.interruption != HUNG:
            echoed |= {fault.member} if fault.consequence else set()
        elif known is None or fault.own_report or not known.own_report:
            reported[fault.member] = fault
    waits = {member: _awaited(member, reported) for member in reported}
    awaited = set[int]().union(*waits.values())
    leads = {member for member, others in waits.items() if others}
    waiting = echoed | leads | {member for member, f in reported.items() if f.consequence}
    counts = {
        member: fault.collectives
        for member, fault in reported.items()
        if member not in waiting and fault.collectives >= 0
    }
    waiting |= {member for member, count in counts.items() if count > min(counts.values())}
    for member, fault in reported.items():
        cause = without_collectives(fault.cause) + _unjoined(member, waits, reported)
        changed: Any = fault
        reported[member] = dataclasses.replace(
            changed, cause=cause, consequence=fault.consequence or member in waiting
        )

    def order(fault: T) -> tuple[bool, bool, bool, int]:
        # Of ranks that all wait, it is one that others wait for.
        is_end = fault.member in awaited - leads
        not_it = fault.consequence and not is_end
        return fault.consequence, not_it, fault.own_report, fault.pings

    found = sorted(reported.values(), key=order)
    if found and (mixed := _mixed(found)):
        first: Any = found[0]
        found[0] = dataclasses.replace(first, cause=first.cause + mixed)
    return found


def _last(fault: Fault | FaultRecord) -> tuple[str, Mapping[str, Any]] | None:
    """The group of the collective that the rank has begun last."""
    return next(((name, each) for name, each in fault.groups.items() if each["last"]), None)


def _awaited(member: int, reported: Mapping[int, Fault | FaultRecord]) -> set[int]:
    """The members that have not begun the collective that this one has begun last."""
    last = _last(reported[member])
    if last is None:
        return set()
    name, at = last
    return {
        other
        for other, fault in reported.items()
        if name in fault.groups and fault.groups[name]["number"] < at["number"]
    }


def _unjoined(
    member: int, waits: Mapping[int, set[int]], reported: Mapping[int, Fault | FaultRecord]
) -> str:
    """In which collectives others wait for this member, in words."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for other, behind in waits.items():
        last = _last(reported[other])
        if member in behind and last is not None:
            key = last[0], last[1]["number"], last[1]["call"]
            found.setdefault(key, []).append(reported[other].rank)
    texts = []
    for (name, number, call), ranks in sorted(found.items()):
        group = reported[member].groups[name]
        verb = "waits" if len(ranks) == 1 else "wait"
        texts.append(
            f"{UNJOINED}{group['number']} of the collectives of {group['label']}, "
            f"and {_ranks(ranks)} {verb} in number {number}, {call}"
        )
    return "".join(texts)


def _mixed(hung: Iterable[Fault | FaultRecord]) -> str:
    """The ranks that have begun different operations as the same collective, in words."""
    calls: dict[tuple[str, int, str], dict[str, list[int]]] = {}
    for fault in hung:
        if last := _last(fault):
            key = last[0], last[1]["number"], last[1]["label"]
            # Tensors may differ in size, except where they are added up.
            call = last[1]["call"]
            calls.setdefault(key, {}).setdefault(call, []).append(fault.rank)
    texts = []
    for (_, number, label), ranks in sorted(calls.items()):
        plain = [call.partition(" at ")[0] for call in ranks]  # without the lines
        if len({call if call.startswith("all_reduce") else call.split()[0] for call in plain}) > 1:
            each = [f"{call} on {_ranks(on)}" for call, on in ranks.items()]
            texts.append(f"{_MIXED}{number} of {label} is {', and '.join(each)}")
    return "".join(texts)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {named}{more}"
