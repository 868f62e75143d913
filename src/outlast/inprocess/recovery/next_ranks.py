"""From an agreed view to the ranks of its members: rank assignment and rank filter.

Every member starts from the same `ViewRecord`, and from what the members publish for the
assignment, so all arrive at consistent ranks (R1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outlast.coordination.barrier import summary
from outlast.coordination.decision import ViewRecord
from outlast.coordination.ops import Link
from outlast.errors import RestartError
from outlast.inprocess.rank_assignment import RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.recovery.host_protocol import Host
from outlast.inprocess.recovery.waits import pass_barrier
from outlast.inprocess.state import State, Status


async def exchange_values(
    link: Link,
    host: Host,
    record: ViewRecord,
    member: int,
    state: State,
    parts: Sequence[RankAssignment],
) -> None:
    """Passes what each member publishes to the parts of the assignment, the same on all: a barrier
    collects it, so that no member waits for one whose loss is known. `state` is that of the
    iteration before. A `RankTimeout` names the ranks whose members did not publish within the
    barrier timeout.
    """
    slots = record.slots()
    joiners = {joiner.member for joiner in record.joiners}
    stayed = [rank for rank, m in enumerate(slots) if m is not None and m not in joiners]
    rank = slots.index(member)
    initial_rank = rank if member in joiners else state.initial_rank
    state = state.copy(rank=rank, world_size=len(slots), initial_rank=initial_rank)
    # Two ranks tell the newcomers, in case one of them is lost on the way.
    tells = bool(joiners) and rank in stayed[:2]
    values = [part.publish(state, for_newcomers=tells) for part in parts]
    if all(value is None for value in values):
        return
    name = f"values/{record.iteration}"
    arrived = summary(await pass_barrier(link, host, name, record, member, values=values))
    for n, part in enumerate(parts):
        found = {slots.index(m): each["values"][n] for m, each in arrived.items() if m in slots}
        part.receive({slot: value for slot, value in found.items() if value is not None})


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
    the assignment or the filter sets a lower active world size. The status is `INACTIVE` for a
    reserve rank, and `INITIALIZED` otherwise.

    A `RestartError` names the terminated ranks that the assignment leaves unhandled, or the ranks
    that do not exist; a `TypeError` the policy that does not return what it must; a `ValueError`
    says that `member` is not in the view. Exceptions of the assignment and the filter, such as
    `RankDiscarded`, are propagated unchanged.
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
    result: Any = assignment(before, set(empty))  # the policy may change the set
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(f"{assignment!r} must return (state, terminated_ranks), not {result!r}")
    after, unhandled = _state(assignment, result[0]), frozenset(result[1] or ())
    # What it has dropped from the world size, it may leave in the set.
    if unhandled and (after.world_size > len(slots) - len(unhandled) or not unhandled >= empty):
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
    filtered = after if rank_filter is None else _state(rank_filter, rank_filter(after))
    if filtered.rank >= filtered.active_world_size:
        filtered = filtered.copy(status=Status.INACTIVE)
    if not 1 <= filtered.active_world_size <= filtered.world_size:
        raise RestartError(
            f"{rank_filter or assignment!r} gave an active world size of "
            f"{filtered.active_world_size} out of {filtered.world_size}"
        )
    return filtered


def _state(policy: object, returned: object) -> State:
    if not isinstance(returned, State):
        raise TypeError(f"{policy!r} must return the state, not {returned!r}")
    return returned
