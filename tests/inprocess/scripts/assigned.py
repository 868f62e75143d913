"""Rank assignments that need to know something of the other ranks."""

from __future__ import annotations

import os

from rank import main, scenario, wrapped
from rank_actions import die, finish, join_group, rank, wait_forever

from outlast.compat.nvrx.tree import Layer, LayerFlag, Tree
from outlast.inprocess import CallWrapper, Compose
from outlast.inprocess.rank_assignment import FilterGroupedByKey, ShiftRanks

FIRST_RANK = int(os.environ["RANK"])
HOST = f"host{FIRST_RANK // 2}"


@scenario
@wrapped(
    rank_assignment=Tree(
        [
            Layer(2, 2, "job", LayerFlag.RESERVE),
            # The function returns what only this process knows.
            Layer(max_ranks=1, key_or_fn=lambda state: HOST, flag=LayerFlag.RESERVE),
        ]
    )
)
def with_a_reserve(call: CallWrapper) -> int:
    """Rank 0 dies; the reserve rank of its host takes its place. The test starts a replacement,
    which is admitted to the reserve.
    """
    join_group()
    if call.iteration == 0 and rank() == 0:
        die()
    if call.state.world_size < 3 or call.iteration == 0:
        wait_forever()
    return finish()


@scenario
@wrapped(
    rank_assignment=Compose(
        ShiftRanks(), FilterGroupedByKey(lambda rank, size: HOST, lambda count: count == 2)
    ),
)
def whole_hosts(call: CallWrapper) -> int:
    """Rank 1 dies, so that rank 0, of the same host, has to leave."""
    join_group()
    if call.iteration == 0:
        if rank() == 1:
            die()
        wait_forever()
    return finish()


if __name__ == "__main__":
    main()
