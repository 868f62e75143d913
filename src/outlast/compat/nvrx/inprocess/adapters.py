"""Policies of 0.4 as the wrapper of `outlast.inprocess` calls them.

A policy of 0.4 gets a `FrozenState`, and what it returns is not used.
"""

from __future__ import annotations

from typing import Any

from outlast.compat.nvrx.inprocess.state import from_core
from outlast.inprocess.abort import Abort
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import HealthCheck
from outlast.inprocess.initialize import Initialize
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.state import State, Status


class _Adapter:
    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        return repr(self._policy)

    def _call(self, state: State, error: BaseException | None = None) -> None:
        self._policy(from_core(state, error).freeze())


class CoreInitialize(_Adapter, Initialize):
    """Calls an `Initialize` of 0.4."""

    def __call__(self, state: State) -> State:
        self._call(state)
        return state


class CoreAbort(_Adapter, Abort):
    """Calls an `Abort` of 0.4, and the hooks of its parts."""

    def _parts(self) -> list[Abort]:
        return [part for part in iter_parts(self._policy) if isinstance(part, Abort)]

    def prepare(self) -> None:
        for part in self._parts():
            part.prepare()

    def __call__(self, state: State) -> State:
        self._call(state)
        return state

    def again(self, state: State) -> None:
        for part in self._parts():
            part.again(state)


class CoreFinalize(_Adapter, Finalize):
    """Calls a `Finalize` of 0.4."""

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        self._call(state, train_ex)
        return state, train_ex


class CoreHealthCheck(_Adapter, HealthCheck):
    """Calls a `HealthCheck` of 0.4."""

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        self._call(state, train_ex)
        return state, train_ex


class CoreRankFilter(_Adapter, RankFilter):
    """Calls a `RankFilter` of 0.4."""

    def __call__(self, state: State) -> State:
        size = self._policy(from_core(state)).active_world_size
        status = state.status if state.rank < size else Status.INACTIVE
        return state.copy(active_world_size=size, status=status)


class CoreCompletion(_Adapter, Completion):
    """Calls a `Completion` of 0.4."""

    def __call__(self, state: State) -> State:
        self._call(state)
        return state


class CoreTerminate(_Adapter, Terminate):
    """Calls a `Terminate` of 0.4."""

    def __call__(self, state: State) -> State:
        self._call(state)
        return state
