"""Decides from which step and which ranks a job continues: a pure function of what they have.

Rank 0 calls it, and the others get the result: all ranks do the same, whatever changes meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from outlast.elastic.job.live.frozen import Held
from outlast.elastic.job.live.own_state import Record, State
from outlast.system.units import rank_names

NOT_THE_SAME_STEPS = "the ranks have not made the same steps"
"""Why a rank has no state that it could save: a step of it is not one of all ranks."""

T = TypeVar("T")


class Own(NamedTuple):
    """The own state of a rank, and the rank that has it now."""

    holder: int
    record: Record


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one rank has, and what it needs."""

    records: list[Record]  # the ranks' own states that this process has
    signature: str  # of the model into which it loads
    resizable: bool  # whether it can do without the ranks' own states in a job of another size
    branches: int  # how many it knows of
    # The states that its tensors hold: the phases of a step, in their order.
    held: list[Held] = dataclasses.field(default_factory=list)
    # Other ranks' own states, from other hosts.
    mirrored: list[Record] = dataclasses.field(default_factory=list)
    mergeable: bool = False  # whether, in one, it can use those of all ranks
    came_back: bool = False  # the last fault is equal to one before it, without progress in between
    why: str = ""  # why its tensors hold none; empty in a process that has noted no step

    def at(self, state: State) -> Held | None:
        """What it holds of this state."""
        return next((each for each in self.held if each.record.has(state)), None)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The state to continue from, and from whom."""

    step: int
    branch: str
    sources: dict[int, list[int]]  # by each rank that receives the tensors, those that have them
    own: list[tuple[int, Record | None]]  # of each rank: who has its own state, and which, if any
    phase: int = 0
    of_all: list[Own] = dataclasses.field(default_factory=list)  # that all receive, by their ranks

    @property
    def state(self) -> State:
        return State(self.step, self.phase, self.branch)

    @property
    def moves(self) -> bool:
        """Whether a rank receives anything from another one."""
        holders = [holder for holder, record in self.own if record is not None]
        own = [rank for rank, (_, record) in enumerate(self.own) if record is not None]
        return bool(self.sources or self.of_all) or holders != own


@dataclasses.dataclass(frozen=True)
class StateToSave:
    """What the ranks that are left save before the job ends."""

    state: State
    holders: list[int]  # who saves its tensors; the first one saves all else
    own: list[Own]  # those of single ranks
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
    return _newest(offers, _complete)


def choose_to_save(offers: Sequence[Offer]) -> StateToSave | str:
    """The newest state of which the ranks that are left have the tensors, and what they have of the
    ranks' own; or why there is none. Where a fault comes back, that is after the last good step.
    """
    if any(offer.why == NOT_THE_SAME_STEPS for offer in offers):
        return NOT_THE_SAME_STEPS
    found = _newest(offers, _savable)
    if isinstance(found, str) or not found.lost:
        return found
    # An earlier phase of the step may have the own states of all ranks.
    earlier = (_savable(offers, each) for each in _states(offers) if each.step == found.state.step)
    whole = (each for each in earlier if not isinstance(each, str) and not each.lost)
    return next(whole, found)


def _states(offers: Sequence[Offer]) -> list[State]:
    """The states of which ranks hold the tensors, the newest one first."""
    states = {
        State(each.record.step, phase, each.record.branch)
        for offer in offers
        for each in offer.held
        for phase in range(each.record.phase, each.record.until + 1)
    }
    return sorted(states, reverse=True)


def _newest(
    offers: Sequence[Offer], completed: Callable[[Sequence[Offer], State], T | str]
) -> T | str:
    """The newest state that can be `completed`, or what is missing of each step."""
    missing: dict[int, str] = {}
    for state in _states(offers):
        found = completed(offers, state)
        if not isinstance(found, str):
            return found
        missing[state.step] = f"step {state.step} lacks {found}"
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


def _complete(offers: Sequence[Offer], state: State) -> Choice | str:
    size = len(offers)
    held, records = _found(offers, state)
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
    chosen = Choice(state.step, state.branch, sources, own, state.phase)
    sizes = {found.record.world_size for found in held.values()}
    if sizes != {size}:
        if not all(offer.resizable for offer in offers):
            of_all = _usable(records, held, min(sizes))
            if None in of_all or not all(offer.mergeable for offer in offers):
                return f"a state that fits {size} ranks instead of {min(sizes)}"
            chosen.of_all.extend(each for each in of_all if each is not None)
        # Each process keeps its own state, if it has one.
        for rank, offer in enumerate(offers):
            final = [each for each in offer.records if each.has(state) and each.final]
            own.append((rank, final[0] if final else None))
        return chosen
    for rank, usable in enumerate(_usable(records, held, size)):
        if usable is None:
            return f"the random generators and other states of rank {rank} alone"
        own.append(usable)
    return chosen


def _savable(offers: Sequence[Offer], state: State) -> StateToSave | str:
    """What is saved of this state, or what is missing of it."""
    held, records = _found(offers, state)
    size = max(found.record.world_size for found in held.values())
    there = {rank for found in held.values() for rank in found.stands_for or range(size)}
    if absent := sorted(set(range(size)) - there):
        return f"the shards of {rank_names(absent)}"
    if len({found.place for found in held.values()}) > 1:
        where = "; ".join(f"rank {rank}{found.place}" for rank, found in held.items())
        return f"ranks that have made the same steps: {where}"
    own = _usable(records, held, size)
    lost = [rank for rank, found in enumerate(own) if found is None]
    if lost and not all(found.resizable for found in held.values()):
        return f"the position in the data, or in a file, of {rank_names(lost)}"
    known = [found for found in own if found is not None]
    return StateToSave(state, list(held), known, lost)


def _found(offers: Sequence[Offer], state: State) -> tuple[dict[int, Held], list[Own]]:
    """What the ranks have of a state: its tensors, and the own states of single ranks."""
    held = {r: found for r, offer in enumerate(offers) if (found := offer.at(state)) is not None}
    own = (
        Own(rank, each)
        for rank, offer in enumerate(offers)
        for each in (*offer.records, *offer.mirrored)
    )
    return held, [found for found in own if found.record.has(state)]


def _usable(records: Sequence[Own], held: Mapping[int, Held], size: int) -> list[Own | None]:
    """The own state of each rank and who has it; `None` if nobody has."""
    # What a rank has noted during the step holds only if nothing has changed until its end, and if
    # it was noted in the last backward pass of the step.
    settled = all(found.settled for found in held.values())
    passes = {found.passes for found in held.values()}
    holds = [r for r in records if r.record.final or (settled and {r.record.passes} == passes)]
    of_size = [each for each in holds if each.record.world_size == size]
    return [_preferred(rank, [r for r in of_size if r.record.rank == rank]) for rank in range(size)]


def _preferred(rank: int, usable: Sequence[Own]) -> Own | None:
    """Rather what the process with this rank has than another one; of that, rather what was noted
    when the step was complete than before; of that, what the first process has.
    """
    noted = [each for each in usable if each.holder == rank] or usable
    final = [each for each in noted if each.record.final] or noted
    return final[0] if final else None
