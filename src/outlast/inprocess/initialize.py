"""Initialize policies, which run on each rank before the function, in every iteration."""

from __future__ import annotations

import abc
import dataclasses

from outlast.errors import RestartAbort
from outlast.inprocess.state import State
from outlast.system.arguments import check_int

__all__ = ["Initialize", "RetryController"]


class Initialize(abc.ABC):
    """Runs on every rank before the function, in every iteration, including the first.

    An `Exception` raised here restarts all ranks, as if the function had raised it; `RestartAbort`
    ends the job on all ranks.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Runs; returns the state, changed or not."""


@dataclasses.dataclass(eq=False)
class RetryController(Initialize):
    """Ends the job if it has been restarted too many times, or has become too small.

    Args:
        max_iterations: the largest number of iterations, including the first run; `None` for no
            limit.
        min_world_size: the smallest number of ranks, including the warm reserve.
        min_active_world_size: the smallest number of ranks that call the function.

    Raises:
        RestartAbort: when called with a state beyond a limit; names the limit and the values.
    """

    max_iterations: int | None = None
    min_world_size: int = 1
    min_active_world_size: int = 1

    def __post_init__(self) -> None:
        if self.max_iterations is not None:
            check_int("max_iterations", self.max_iterations, at_least=1)
        check_int("min_world_size", self.min_world_size, at_least=0)
        check_int("min_active_world_size", self.min_active_world_size, at_least=0)

    def __call__(self, state: State) -> State:
        passed = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            passed.append(
                f"iteration {state.iteration} (counted from 0) reaches "
                f"max_iterations={self.max_iterations}"
            )
        if state.world_size < self.min_world_size:
            passed.append(
                f"world size {state.world_size} is below min_world_size={self.min_world_size}"
            )
        if state.active_world_size < self.min_active_world_size:
            passed.append(
                f"active world size {state.active_world_size} is below "
                f"min_active_world_size={self.min_active_world_size}"
            )
        if passed:
            raise RestartAbort(f"rank {state.rank}: RetryController: {'; '.join(passed)}")
        return state
