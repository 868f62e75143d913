"""Health checks, with the call of 0.4: `state -> state`."""

from __future__ import annotations

import abc
import datetime
from typing import Any

from outlast.compat.nvrx.inprocess.state import FrozenState, State, to_core
from outlast.errors import FaultCounterExceeded
from outlast.inprocess import health_check as core

__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


class HealthCheck(abc.ABC):
    """Runs before the function, where a failure restarts all ranks, and after `finalize`, where a
    failure excludes this rank.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Raises if the rank is not healthy."""


class CudaHealthCheck(HealthCheck):
    """`outlast.inprocess.health_check.CudaHealthCheck`."""

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        self._core = core.CudaHealthCheck(timeout)

    def __call__(self, state: FrozenState | State) -> Any:
        self._core(to_core(state), state.fn_exception)
        return state


class FaultCounter(HealthCheck):
    """`outlast.inprocess.health_check.FaultCounter`."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self._core = core.FaultCounter(max_rank_faults)

    @property
    def faults_count(self) -> int:
        """The number of faults so far."""
        return self._core.faults

    def __call__(self, state: FrozenState | State) -> Any:
        self._core(to_core(state), state.fn_exception)
        return state
