"""From an agreed view to the ranks of its members: applies rank assignment and rank filter.

These functions are pure if the assignment and the filter are (`FilterGroupedByKey` with a string
reads the store). Every member starts from the same `ViewRecord`, so all members arrive at a
consistent assignment (R1) without communication.
"""

from __future__ import annotations

from outlast.coordination.decisions.view import ViewRecord
from outlast.errors import RestartError
from outlast.inprocess.rank_assignment import RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.state import State, Status


def state_in_view(
    record: ViewRecord,
    member: int,
    state: State,
    assignment: RankAssignment,
    rank_filter: RankFilter | None = None,
) -> State:
    """The state of `member` in the iteration that starts with `record`; `state` is not changed.

    The assignment gets the member's index in `record.slots()` as its rank, the number of slots, and
    the empty slots as terminated ranks; the filter gets the result. All ranks are active, unless
    the assignment or the filter sets a lower active world size. The
    status is `INACTIVE` for a reserve rank, and `INITIALIZED` otherwise.

    Raises:
        RestartError: if the assignment leaves terminated ranks unhandled, or gives a rank that
            does not exist; names them. Exceptions of the assignment and the filter, such as
            `RankDiscarded`, are propagated unchanged.
        ValueError: if `member` is not in the view.
    """
    slots = record.slots()
    if member not in slots:
        raise ValueError(f"member {member} is not in the view of iteration {record.iteration}")
    before = state.copy(
        rank=slots.index(member),
        world_size=len(slots),
        active_world_size=0,  # all: follows the world size
        iteration=record.iteration,
        status=Status.INITIALIZED,
    )
    empty = frozenset(rank for rank, holder in enumerate(slots) if holder is None)
    after, unhandled = assignment(before, empty)
    if unhandled:
        raise RestartError(
            f"{assignment!r} leaves terminated ranks {sorted(unhandled)} unhandled: it must be "
            "followed by a policy that drops them, as in Compose(ShiftRanks(), ...)"
        )
    if not 0 <= after.rank < after.world_size:
        raise RestartError(
            f"{assignment!r} gave rank {after.rank} of a world size of {after.world_size}"
        )
    # A user's assignment need not know of reserve ranks, and may leave the size as it was.
    after = after.copy(active_world_size=min(after.active_world_size, after.world_size))
    filtered = after if rank_filter is None else rank_filter(after)
    if filtered.rank >= filtered.active_world_size:
        filtered = filtered.copy(status=Status.INACTIVE)
    if not 1 <= filtered.active_world_size <= filtered.world_size:
        raise RestartError(
            f"{rank_filter or assignment!r} gave an active world size of "
            f"{filtered.active_world_size} out of {filtered.world_size}"
        )
    return filtered
