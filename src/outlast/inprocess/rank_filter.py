"""Rank filters, which select the ranks that call the function; the others are a warm reserve.

A filter starts from the given `active_world_size`, which is the world size after the rank
assignment, and can only lower it. So filters compose: `Compose(WorldSizeDivisibleBy(4),
MaxActiveWorldSize(10))` lets 8 ranks out of 12 run.
"""

from __future__ import annotations

import abc
import dataclasses

from outlast.errors import RestartAbort
from outlast.inprocess.state import State, Status
from outlast.system.arguments import check_int

__all__ = ["MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Selects the active ranks of an iteration, after the rank assignment.

    Every rank calls it with its own state, and all must get the same active world size. The active
    ranks are the lowest ones. Its exceptions are propagated unchanged.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Returns the state with `active_world_size` set to the number of active ranks, and with
        `Status.INACTIVE` if `state.rank` is not one of them. Other ranks keep their status.
        """


@dataclasses.dataclass(eq=False)
class MaxActiveWorldSize(RankFilter):
    """Lets the first `max_active_world_size` ranks call the function.

    Args:
        max_active_world_size: the largest number of active ranks; `None` for no limit.
    """

    max_active_world_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_active_world_size is not None:
            check_int("max_active_world_size", self.max_active_world_size, at_least=1)

    def __call__(self, state: State) -> State:
        active = state.active_world_size
        if self.max_active_world_size is not None:
            active = min(active, self.max_active_world_size)
        return _limited(state, active)


@dataclasses.dataclass(eq=False)
class WorldSizeDivisibleBy(RankFilter):
    """Lets as many ranks call the function as the largest possible multiple of `divisor`.

    Args:
        divisor: divisor of the number of active ranks.

    Raises:
        RestartAbort: when called with fewer ranks than `divisor`: no rank could call the function,
            and the reserve would wait forever. It is raised on all ranks, and ends the job.
            `AwaitReplacements` in the rank assignment holds a restart until lost ranks are
            replaced, before the filter is called.
    """

    divisor: int = 1

    def __post_init__(self) -> None:
        check_int("divisor", self.divisor, at_least=1)

    def __call__(self, state: State) -> State:
        active = state.active_world_size - state.active_world_size % self.divisor
        if not active:
            raise RestartAbort(
                f"rank {state.rank}: WorldSizeDivisibleBy: no rank can be active: an active world "
                f"size of {state.active_world_size} is below divisor={self.divisor}"
            )
        return _limited(state, active)


def _limited(state: State, active: int) -> State:
    status = state.status if state.rank < active else Status.INACTIVE
    return state.copy(active_world_size=active, status=status)
