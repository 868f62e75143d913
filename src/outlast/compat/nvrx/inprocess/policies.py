"""Finalize policies, health checks, rank filters, callbacks (`state -> state`), exceptions of 0.4.

The modules `finalize`, `health_check`, `rank_filter`, `nested_restarter` and `exception` of 0.4 are
other names of this one. It deprecates rank filters in favor of `rank_assignment`.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
import logging
import warnings
from collections.abc import Callable
from typing import Any

from outlast.compat.nvrx.inprocess import rank_assignment
from outlast.compat.nvrx.state import FrozenState, State, to_core
from outlast.errors import (
    FaultCounterExceeded,
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    RankTimeout,
    RestartAbort,
    RestartError,
)
from outlast.inprocess import finalize, health_check
from outlast.inprocess.abort import Abort
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.initialize import Initialize

__all__ = [
    "ActiveWorldSizeDivisibleBy",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "Finalize",
    "HealthCheck",
    "HealthCheckError",
    "InternalError",
    "MaxActiveWorldSize",
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "NestedRestarterLogger",
    "RankFilter",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "ThreadedFinalize",
    "TimeoutError",
    "WorldSizeDivisibleBy",
]


TimeoutError = RankTimeout


class Finalize(abc.ABC):
    """Prepares the process for a restart. An exception ends this rank."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Runs; `state.fn_exception` is what the function raised on this rank."""


class _Called:
    """Calls a policy of `outlast.inprocess`."""

    _core: Any

    def __call__(self, state: FrozenState | State) -> Any:
        self._core(to_core(state), state.fn_exception)
        return state


class ThreadedFinalize(_Called, Finalize):
    """`outlast.inprocess.finalize.ThreadedFinalize`; it does not need CUDA."""

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._core = finalize.ThreadedFinalize(timeout, fn, args or (), kwargs)


class HealthCheck(abc.ABC):
    """A failure before the function restarts all ranks; after `finalize`, it excludes this one."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Raises if the rank is not healthy."""


class CudaHealthCheck(_Called, HealthCheck):
    """`outlast.inprocess.health_check.CudaHealthCheck`."""

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        self._core = health_check.CudaHealthCheck(timeout)


class FaultCounter(_Called, HealthCheck):
    """`outlast.inprocess.health_check.FaultCounter`."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self._core = health_check.FaultCounter(max_rank_faults)

    @property
    def faults_count(self) -> int:
        return int(self._core.faults)


class RankFilter(abc.ABC):
    """Selects the active ranks, after the rank assignment."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Returns the state with its active rank and active world size."""


class _Filter(RankFilter):
    _filter: rank_assignment.RankFilter

    def __call__(self, state: State) -> State:
        return self._filter(rank_assignment.RankAssignmentCtx(state, None, set())).state


class MaxActiveWorldSize(_Filter):
    """See `rank_assignment.MaxActiveWorldSize`."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        _deprecated("MaxActiveWorldSize", "MaxActiveWorldSize")
        self._filter = rank_assignment.MaxActiveWorldSize(max_active_world_size)


class ActiveWorldSizeDivisibleBy(_Filter):
    """See `rank_assignment.ActiveWorldSizeDivisibleBy`."""

    def __init__(self, divisor: int = 1) -> None:
        _deprecated(type(self).__name__, "ActiveWorldSizeDivisibleBy")
        self._filter = rank_assignment.ActiveWorldSizeDivisibleBy(divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """The same, by another name."""


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(
        f"rank_filter.{name} is deprecated: use rank_assignment.{instead}",
        DeprecationWarning,
        stacklevel=3,
    )


class NestedRestarterLogger:
    """Writes the lines at level INFO. It adds no handler: configure the logger `name`."""

    def __init__(self, name: str = "outlast.compat.nvrx.nested_restarter") -> None:
        self.restarter_logger = logging.getLogger(name)

    def set_connected_rank(self, rank: int | None) -> None:
        self.rank = rank

    def log_for_restarter(self, message: str) -> None:
        self.restarter_logger.info(message)


_LOGGER = NestedRestarterLogger()


@dataclasses.dataclass
class NestedRestarterCallback:
    """Writes a line on one rank.

    Args:
        restarter_state, restarter_stage: what the line says.
        special_rank: the initial rank that writes it.
    """

    restarter_state: str
    restarter_stage: str | None = None
    logger: NestedRestarterLogger = dataclasses.field(default=_LOGGER)
    special_rank: int = 0

    def __call__(self, state: Any) -> Any:
        if state.initial_rank == self.special_rank:
            stage = f" stage={self.restarter_stage}" if self.restarter_stage is not None else ""
            self.logger.set_connected_rank(state.initial_rank)
            self.logger.log_for_restarter(
                f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}"
            )
        return state


@dataclasses.dataclass(init=False)
class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """For `initialize`: `initialize` at first, then `handling`, `completed`."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", special_rank=special_rank)

    def __call__(self, state: Any) -> Any:
        state = super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


@dataclasses.dataclass
class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """For `abort`: the handling of a fault starts."""

    restarter_state: str = "handling"
    restarter_stage: str | None = "starting"


@dataclasses.dataclass
class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """For `completion`: the job has completed."""

    restarter_state: str = "finalized"


@dataclasses.dataclass
class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """For `terminate`: the rank leaves."""

    restarter_state: str = "aborted"
