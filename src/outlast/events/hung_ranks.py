"""Which of several hung ranks the others waited for, and in which collective; or which of them has
no more batches, while others are in a step that needs all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import HUNG
from outlast.events.types import Fault
from outlast.system.units import rank_names

UNJOINED = "; it has begun "
"""Begins what `hung_ranks` adds to the cause of a rank that others wait for."""
_MIXED = "; collective "
BETWEEN, IN_STEP, NO_MORE, LEFT = "between", "in step", "no more batches", "left its loop"
"""Where the loop of a rank is, as far as it is known: after a step, it has taken no batch yet; it
has; its pass over the batches has come to its end; the job's `with` block has.
"""
IN_SAVE = ", in job.save()"
"""Added to where the loop of a rank is, while it is in a save that its program has asked for."""
EQUAL_STEPS = (
    "all ranks must make the same number of steps: give them equally many batches "
    "(drop_last=True, a DistributedSampler, or outlast.elastic.ElasticLoader), and skip a batch on "
    "all ranks or on none; torch's join() is not supported"
)
"""What to do about ranks with different numbers of steps."""
_PERHAPS = "waits, perhaps"
_AFTER_ADVICE = f"; {EQUAL_STEPS}; "
_AFTER_SAVE = "; call job.save() on all ranks, after the same step; "

T = TypeVar("T", bound=Fault | FaultRecord)
"""Of both: `collectives` is -1 if unknown; `groups` are those of `interruption.flight_recorder`."""


def without_collectives(cause: str) -> str:
    """The cause as the rank itself reported it."""
    own = cause.rpartition(_AFTER_ADVICE)[2].rpartition(_AFTER_SAVE)[2]
    return own.partition(UNJOINED)[0].partition(_MIXED)[0]


def is_uneven(cause: str) -> bool:
    """Whether it is the cause, by `hung_ranks`, of ranks that do not make the same steps, or saves:
    each restart would come to the same hang, or go on without the save.
    """
    uneven, found, _ = cause.rpartition(_AFTER_ADVICE)
    return (bool(found) and _PERHAPS not in uneven) or _AFTER_SAVE in cause


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
      the rank with the fewest pings is the furthest behind;
    * before all these, where every rank waits for others: one that has no more batches, although
      another one has begun a step that it has not made; or one that is in a save that its program
      has asked for, while others go on.

    To the cause of a rank that others wait for is added in which collective they do.
    """
    reported: dict[int, T] = {}
    echoed: set[int] = set()
    for fault in faults:
        known = reported.get(fault.member)
        if fault.interruption != HUNG:
            if fault.consequence:
                echoed.add(fault.member)
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
    uneven, cause = _uneven(found)
    if uneven is not None:
        changed = uneven
        found[found.index(uneven)] = found[0]
        found[0] = dataclasses.replace(changed, cause=cause + uneven.cause)
    return found


def _uneven(hung: Sequence[T]) -> tuple[T | None, str]:
    """A rank that has no more batches, and what to say of it, if others wait for it to make a step
    that it does not make; or one that saves alone.
    """
    known = [each for each in hung if each.made >= 0]
    if not known or not all(each.consequence for each in hung):
        return None, ""
    at = {each.rank: each.loop_at.removesuffix(IN_SAVE) for each in known}
    most = max(each.passes for each in known)
    over = [each for each in known if each.passes == most]
    made = min(each.made for each in over)
    behind = [
        each
        for each in known
        if each.passes < most
        and (each.made > made or (each.made == made and at[each.rank] in (IN_STEP, "")))
    ]
    if not behind:
        return _alone_in_save(known)
    over = [each for each in over if each.made == made]
    least = min(each.made for each in behind)
    others = [each for each in behind if each.made == least]
    ranks, waiting = (sorted(each.rank for each in found) for found in (over, others))
    has, have = ("has" if len(each) == 1 else "have" for each in (ranks, waiting))
    step = f"{'is' if len(waiting) == 1 else 'are'} {IN_STEP} {least + 1}"
    if not all(at[each.rank] in (NO_MORE, LEFT) for each in over):
        step = f"{_PERHAPS} in the step after {least}"
    elif least > made and any(at[each.rank] != IN_STEP for each in others):
        step = f"{have} made {least}"
    what = LEFT if at[over[0].rank] == LEFT else NO_MORE
    text = f"{rank_names(ranks)} {has} {what} ({made} steps), {rank_names(waiting)} {step}"
    return over[0], text + _AFTER_ADVICE


def _alone_in_save(known: Sequence[T]) -> tuple[T | None, str]:
    """The first rank that is in a save of its program, if others have gone on without it."""
    here = [each for each in known if each.loop_at.endswith(IN_SAVE)]
    others = [each for each in known if each not in here]
    if not here or not others or min(each.made for each in others) < here[0].made:
        return None, ""
    ranks, rest = (sorted(each.rank for each in found) for found in (here, others))
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"{rank_names(ranks)} {verb} in job.save(), after step {here[0].made}"
    return here[0], f"{text}, which {rank_names(rest)} did not call{_AFTER_SAVE}"


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
            f"and {rank_names(sorted(ranks))} {verb} in number {number}, {call}"
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
            each = [f"{call} on {rank_names(sorted(on))}" for call, on in ranks.items()]
            texts.append(f"{_MIXED}{number} of {label} is {', and '.join(each)}")
    return "".join(texts)
