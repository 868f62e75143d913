"""Finalize policies, with the call of 0.4: `state -> state`."""

from __future__ import annotations

import abc
import datetime
from collections.abc import Callable
from typing import Any

from outlast.compat.nvrx.inprocess.state import FrozenState, State, to_core
from outlast.inprocess import finalize as core

__all__ = ["Finalize", "ThreadedFinalize"]


class Finalize(abc.ABC):
    """Prepares the process for a restart. An exception ends this rank."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Runs; `state.fn_exception` is what the function raised on this rank."""


class ThreadedFinalize(Finalize):
    """`outlast.inprocess.finalize.ThreadedFinalize`; it does not need CUDA."""

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._core = core.ThreadedFinalize(timeout, fn, args or (), kwargs)

    def __call__(self, state: FrozenState | State) -> Any:
        self._core(to_core(state), state.fn_exception)
        return state
