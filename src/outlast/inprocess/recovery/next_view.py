"""From an agreed view to the places of its members: rank assignment and filter, applied.

Pure functions, as far as the assignment and the filter are (`FilterGroupedByKey` with a string
asks the store). Every member works from the same `ViewRecord`, so they all come to places that fit
together (R1) without a word.
"""

from __future__ import annotations

from outlast.coordination.view import ViewRecord
from outlast.errors import RankDiscarded, RestartError
from outlast.inprocess.rank_assignment import RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.state import State, Status

__all__ = ["next_places", "place_of"]


def place_of(
    record: ViewRecord,
    member: int,
    state: State,
    assignment: RankAssignment,
    rank_filter: RankFilter | None = None,
) -> State:
    """The state of `member` in the iteration that `record` starts.

    Args:
        record: the agreed view.
        member: one of `record.slots()`.
        state: of that member, as it is; it is not changed.
        assignment: given the member's place in `record.slots()`, the number of the places, and
            the empty ones as the terminated ranks.
        rank_filter: given the result with everyone active; `None` leaves it so.

    Returns:
        The state with the new rank, sizes and iteration; its status is `INACTIVE` for a rank of
        the reserve, and `INITIALIZED` otherwise.

    Raises:
        RestartError: if the assignment leaves terminated ranks unhandled, or gives a place that
            does not exist; names them. What the assignment and the filter raise (`RankDiscarded`
            among it) goes up as it is.
        ValueError: if `member` is not in the view.
    """
    slots = record.slots()
    if member not in slots:
        raise ValueError(f"member {member} is not in the view of iteration {record.iteration}")
    before = state.copy(
        rank=slots.index(member),
        world_size=len(slots),
        active_world_size=len(slots),
        iteration=record.iteration,
        status=Status.INITIALIZED,
    )
    empty = frozenset(rank for rank, holder in enumerate(slots) if holder is None)
    after, unhandled = assignment(before, empty)
    if unhandled:
        raise RestartError(
            f"{assignment!r} leaves terminated ranks {sorted(unhandled)} unhandled: it is to be "
            "followed by a policy that drops them, as in Compose(ShiftRanks(), ...)"
        )
    if not 0 <= after.rank < after.world_size:
        raise RestartError(
            f"{assignment!r} gave rank {after.rank} of a world size of {after.world_size}"
        )
    # An assignment of the user's need not know that some ranks may be a reserve.
    after = after.copy(active_world_size=after.world_size)
    if rank_filter is None:
        return after
    filtered = rank_filter(after)
    if not 1 <= filtered.active_world_size <= filtered.world_size:
        raise RestartError(
            f"{rank_filter!r} gave an active world size of {filtered.active_world_size} out of "
            f"{filtered.world_size}"
        )
    return filtered


def next_places(
    record: ViewRecord, assignment: RankAssignment, rank_filter: RankFilter | None = None
) -> dict[int, State]:
    """The states of all members of the view, by member, as `place_of` gives them to each.

    A member that the assignment discards is left out. Each stands for a process that came into
    the place that it has in `record.slots()`, and has no store.

    Raises:
        RestartError: if the assignment leaves terminated ranks unhandled.
    """
    slots = record.slots()
    places: dict[int, State] = {}
    for rank, member in enumerate(slots):
        if member is None:
            continue
        state = State(rank, len(slots), initial_rank=rank, initial_world_size=len(slots))
        try:
            places[member] = place_of(record, member, state, assignment, rank_filter)
        except RankDiscarded:
            continue
    return places
