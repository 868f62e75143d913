"""States, and hypothesis strategies for view changes, for the tests of policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from outlast.coordination.decision import Joiner, ViewRecord, decide
from outlast.errors import RankDiscarded
from outlast.inprocess.rank_assignment import FilterGroupedByKey, RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.recovery.next_ranks import state_in_view
from outlast.inprocess.state import State


def state_of(rank: int, size: int, **changes: Any) -> State:
    """The state of a rank that still has its initial rank."""
    return State(rank, size, initial_rank=rank, initial_world_size=size).copy(**changes)


class Marks(RankAssignment):
    """`FilterGroupedByKey`, with a function that each rank calls for all: no exchange."""

    def __init__(self, key: Callable[[int, int], object], condition: Callable[[int], bool]) -> None:
        self.marks = FilterGroupedByKey(key, condition)

    def __call__(self, state: State, terminated_ranks: Any) -> Any:
        return state, self.marks(state.copy(store=None), terminated_ranks)[1]


@st.composite
def sizes_with_gaps(draw: st.DrawFn, max_size: int = 12) -> tuple[int, frozenset[int]]:
    """A world size, and the terminated ranks."""
    size = draw(st.integers(1, max_size))
    return size, draw(st.frozensets(st.integers(0, size - 1)))


@dataclass(frozen=True)
class ViewChange:
    """The arguments of `decide`, and its result."""

    roster: dict[int, int]
    world_size: int
    lost: frozenset[int]
    joiners: list[Joiner]
    record: ViewRecord

    @property
    def survivors(self) -> dict[int, int]:
        """The members of the previous iteration that continue, by rank."""
        return {rank: m for rank, m in self.roster.items() if m not in self.lost}

    @property
    def newcomers(self) -> list[Joiner]:
        """Live processes that have asked to join and are not members yet."""
        inside = set(self.roster.values())
        return [j for j in self.joiners if j.member not in inside | self.lost]


@st.composite
def view_changes(draw: st.DrawFn) -> ViewChange:
    """The end of an iteration: some ranks never taken, some members lost, some processes new."""
    size = draw(st.integers(1, 8))
    members = draw(st.lists(st.integers(0, 30), min_size=size, max_size=size, unique=True))
    held = draw(st.frozensets(st.integers(0, size - 1)))
    roster = {rank: members[rank] for rank in held}
    # Requests are kept for the life of a job, including those of admitted and dead members.
    asked = draw(st.lists(st.integers(0, 40), max_size=8, unique=True))
    joiners = [Joiner(m, draw(st.integers(-1, size + 2))) for m in asked]
    known = sorted({*roster.values(), *asked})
    lost = draw(st.frozensets(st.sampled_from(known))) if known else frozenset[int]()
    return ViewChange(roster, size, lost, joiners, decide(7, roster, size, lost, joiners))


def states_in_view(
    record: ViewRecord, assignment: RankAssignment, rank_filter: RankFilter | None = None
) -> dict[int, State]:
    """The states of all members of the view, by member, as `state_in_view` gives them to each.

    A member that the assignment discards is left out. The states are those of processes whose
    initial rank is their index in `record.slots()`, with a store, as in a job.

    Raises:
        RestartError: if the assignment leaves terminated ranks unhandled.
    """
    slots = record.slots()
    places: dict[int, State] = {}
    for rank, member in enumerate(slots):
        if member is None:
            continue
        state = state_of(rank, len(slots), store=object())
        try:
            places[member] = state_in_view(record, member, state, assignment, rank_filter)
        except RankDiscarded:
            continue
    return places
