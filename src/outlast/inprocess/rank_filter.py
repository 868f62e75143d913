"""Which ranks call the function; the others wait as a warm reserve.

A filter works on the `active_world_size` that it is given, which after the rank assignment is the
world size, and only ever lowers it; so filters compose: `Compose(WorldSizeDivisibleBy(4),
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
    """Picks the active ranks of an iteration, after the rank assignment.

    Every rank calls it with its own state, and all must come to the same active world size. The
    active ranks are the first ones. An exception goes up as it is.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Returns the state with `active_world_size` set to how many ranks are active, and with
        `Status.INACTIVE` if `state.rank` is not one of them. Other ranks keep their status.
        """


@dataclasses.dataclass(eq=False)
class MaxActiveWorldSize(RankFilter):
    """Lets the first `max_active_world_size` ranks call the function.

    Args:
        max_active_world_size: the greatest number of active ranks; `None` for as many as there
            are.
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
    """Lets as many ranks call the function as `divisor` divides.

    Args:
        divisor: what the number of active ranks must be a multiple of.

    Raises:
        RestartAbort: when called with fewer ranks than `divisor`: as nobody could call the
            function, nobody would ever end the wait of the reserve. It is raised on all ranks
            alike, and ends the job. `AwaitReplacements` in the rank assignment holds a restart
            until lost ranks were replaced, before this is asked.
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
