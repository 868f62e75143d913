"""Decides from which step and which ranks a job continues: a pure function of what they have.

Rank 0 calls it, and the others get the result: all ranks do the same, whatever changes meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from outlast.elastic.job.live.frozen import Held
from outlast.elastic.job.live.own_state import Record
from outlast.system.units import rank_names

NOT_THE_SAME_STEPS = "the ranks have not made the same steps"
"""Why a rank has no state that it could save: a step of it is not one of all ranks."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one rank has, and what it needs."""

    records: list[Record]  # the ranks' own states that this process has
    signature: str  # of the model into which it loads
    resizable: bool  # whether it can do without its own state in a job of another size
    branches: int  # how many it knows of
    # The states that its tensors hold: the phases of a step, in their order.
    held: list[Held] = dataclasses.field(default_factory=list)
    came_back: bool = False  # the last fault is equal to one before it, without progress in between
    why: str = ""  # why its tensors hold none; empty in a process that has noted no step

    def at(self, step: int, phase: int, branch: str) -> Held | None:
        """What it holds of this state."""
        return next((each for each in self.held if each.record.has(step, phase, branch)), None)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The state to continue from, which `step`, `branch` and `phase` identify."""

    step: int
    branch: str
    sources: dict[int, list[int]]  # by each rank that receives the tensors, those that have them
    own: list[tuple[int, Record | None]]  # of each rank: who has its own state, and which, if any
    phase: int = 0


@dataclasses.dataclass(frozen=True)
class StateToSave:
    """What the ranks that are left save before the job ends."""

    step: int
    phase: int
    branch: str
    holders: list[int]  # who saves its tensors; the first one saves all else
    own: list[tuple[int, Record]]  # who has the own states of single ranks
    lost: list[int]  # the ranks whose own states nobody has


def next_branch(offers: Sequence[Offer], mark: str) -> str:
    """The name of a new branch; `mark` makes it unique. Later ones are greater."""
    return f"{1 + max(offer.branches for offer in offers):09d}-{mark}"


def choose(offers: Sequence[Offer]) -> Choice | str:
    """The newest state of which all parts are left, or why there is none: empty if no process has
    noted a step. `offers` are in the order of the ranks.
    """
    if not any(offer.held or offer.why or offer.records for offer in offers):
        return ""
    if any(offer.came_back for offer in offers):
        return "the same fault came back, so the state of the ranks may be its cause"
    # Where some ranks have gone further in a step than others: the last phase that every rank has.
    return _newest(offers, partial(_complete, offers))


def choose_to_save(offers: Sequence[Offer]) -> StateToSave | str:
    """The newest state of which the ranks that are left have the tensors, and what they have of the
    ranks' own; or why there is none. Where a fault comes back, that is after the last good step.
    """
    if any(offer.why == NOT_THE_SAME_STEPS for offer in offers):
        return NOT_THE_SAME_STEPS
    found = _newest(offers, partial(_savable, offers))
    if isinstance(found, str) or not found.lost:
        return found
    # An earlier phase of the step may have the own states of all ranks.
    whole = _newest(offers, partial(_savable, offers, whole=True))
    return found if isinstance(whole, str) or whole.step < found.step else whole


def _newest(offers: Sequence[Offer], complete: Callable[[int, int, str], T | str]) -> T | str:
    """The newest state that is `complete`, or what is missing of each step."""
    states = {
        (each.record.step, phase, each.record.branch)
        for offer in offers
        for each in offer.held
        for phase in range(each.record.phase, each.record.until + 1)
    }
    missing: dict[int, str] = {}
    for step, phase, made_on in sorted(states, reverse=True):
        found = complete(step, phase, made_on)
        if not isinstance(found, str):
            return found
        missing[step] = f"step {step} lacks {found}"
    by_reason: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if not offer.held:
            by_reason.setdefault(offer.why or "a new process", []).append(rank)
    return "; ".join(
        [
            *missing.values(),
            *(f"{rank_names(ranks)}: {why}" for why, ranks in by_reason.items()),
        ]
    )


def _complete(offers: Sequence[Offer], step: int, phase: int, made_on: str) -> Choice | str:
    size = len(offers)
    held, records = _found(offers, step, phase, made_on)
    sources: dict[int, list[int]] = {}
    for rank, offer in enumerate(offers):
        alike = [each for each, found in held.items() if found.signature == offer.signature]
        if rank in alike:
            continue
        if not alike:
            return f"the tensors of rank {rank}"
        layout = held[alike[0]].layout
        sources[rank] = [each for each in alike if held[each].layout == layout]
    own: list[tuple[int, Record | None]] = []
    sizes = {found.record.world_size for found in held.values()}
    if sizes != {size}:
        if not all(offer.resizable for offer in offers):
            return f"a state that fits {size} ranks instead of {min(sizes)}"
        # Each process keeps its own state, if it has one.
        for rank in range(size):
            final = [record for holder, record in records if holder == rank and record.final]
            own.append((rank, final[0] if final else None))
        return Choice(step, made_on, sources, own, phase)
    for rank, usable in enumerate(_usable(records, held, size)):
        if usable is None:
            return f"the random generators and other states of rank {rank} alone"
        own.append(usable)
    return Choice(step, made_on, sources, own, phase)


def _savable(
    offers: Sequence[Offer], step: int, phase: int, made_on: str, *, whole: bool = False
) -> StateToSave | str:
    """What is saved of this state, or what is missing of it; `whole`: of any rank."""
    held, records = _found(offers, step, phase, made_on)
    size = max(found.record.world_size for found in held.values())
    there = {rank for found in held.values() for rank in found.stands_for or range(size)}
    if absent := sorted(set(range(size)) - there):
        return f"the shards of {rank_names(absent)}"
    if len({found.place for found in held.values()}) > 1:
        where = "; ".join(f"rank {rank}{found.place}" for rank, found in held.items())
        return f"ranks that have made the same steps: {where}"
    own = _usable(records, held, size)
    lost = [rank for rank, found in enumerate(own) if found is None]
    if lost and (whole or not all(found.resizable for found in held.values())):
        return f"the position in the data, or in a file, of {rank_names(lost)}"
    known = [found for found in own if found is not None]
    return StateToSave(step, phase, made_on, list(held), known, lost)


def _found(
    offers: Sequence[Offer], step: int, phase: int, made_on: str
) -> tuple[dict[int, Held], list[tuple[int, Record]]]:
    """What the ranks have of a state: its tensors, and the own states of single ranks."""
    state = step, phase, made_on
    held = {r: found for r, offer in enumerate(offers) if (found := offer.at(*state)) is not None}
    own = ((r, each) for r, offer in enumerate(offers) for each in offer.records)
    return held, [found for found in own if found[1].has(*state)]


def _usable(
    records: Sequence[tuple[int, Record]], held: Mapping[int, Held], size: int
) -> list[tuple[int, Record] | None]:
    """The own state of each rank and who has it; `None` if nobody has."""
    # What a rank has noted during the step holds only if nothing has changed until its end, and if
    # it was noted in the last backward pass of the step.
    settled = all(found.settled for found in held.values())
    passes = {found.passes for found in held.values()}
    own: list[tuple[int, Record] | None] = []
    for rank in range(size):
        usable = [
            (holder != rank, not record.final, holder, record)
            for holder, record in records
            if (record.rank, record.world_size) == (rank, size)
            and (record.final or (settled and {record.passes} == passes))
        ]
        best = min(usable, key=lambda each: each[:3], default=None)
        own.append(None if best is None else best[2:])
    return own
