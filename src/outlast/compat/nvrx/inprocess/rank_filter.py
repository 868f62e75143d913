"""Rank filters, which 0.4 deprecates in favor of `rank_assignment`."""

from __future__ import annotations

import abc
import warnings

from outlast.compat.nvrx.inprocess import rank_assignment
from outlast.compat.nvrx.inprocess.state import State

__all__ = ["ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


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
        _deprecated("ActiveWorldSizeDivisibleBy", "ActiveWorldSizeDivisibleBy")
        self._filter = rank_assignment.ActiveWorldSizeDivisibleBy(divisor)


class WorldSizeDivisibleBy(_Filter):
    """See `rank_assignment.ActiveWorldSizeDivisibleBy`."""

    def __init__(self, divisor: int = 1) -> None:
        _deprecated("WorldSizeDivisibleBy", "ActiveWorldSizeDivisibleBy")
        self._filter = rank_assignment.ActiveWorldSizeDivisibleBy(divisor)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(
        f"rank_filter.{name} is deprecated: use rank_assignment.{instead}",
        DeprecationWarning,
        stacklevel=3,
    )
