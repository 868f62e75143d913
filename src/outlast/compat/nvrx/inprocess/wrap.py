"""`Wrapper` with the arguments of 0.4, and its policies as `outlast.inprocess` calls them."""

from __future__ import annotations

import datetime
import functools
import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from outlast.compat.nvrx.inprocess.policies import Finalize, HealthCheck, RankFilter
from outlast.compat.nvrx.inprocess.rank_assignment import (
    ActivateAllRanks,
    RankAssignment,
    ShiftRanks,
    as_core,
)
from outlast.compat.nvrx.state import from_core
from outlast.inprocess import CallWrapper
from outlast.inprocess import Wrapper as CoreWrapper
from outlast.inprocess.abort import Abort, AbortTorchDistributed, run_all
from outlast.inprocess.compose import Compose, iter_parts
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.finalize import Finalize as CoreFinalize
from outlast.inprocess.health_check import HealthCheck as CoreHealthCheck
from outlast.inprocess.initialize import Initialize
from outlast.inprocess.rank_filter import RankFilter as CoreRankFilter
from outlast.inprocess.state import State, Status
from outlast.inprocess.store import StoreMixin, TCPStore

__all__ = ["CallWrapper", "Wrapper"]

F = TypeVar("F", bound=Callable[..., Any])

_BY_NAME = "inprocess_call_wrapper"
"""Megatron's parameter for the call wrapper, which its newest versions do not annotate with it."""


class Wrapper:
    """`outlast.inprocess.Wrapper`, which documents the arguments, with the names of 0.4.

    `heartbeat_interval` and `monitor_process_interval` are one interval here: the shorter one.
    """

    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008 - keeps no state of a call
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = Compose(ActivateAllRanks(), ShiftRanks()),  # noqa: B008
        rank_filter: RankFilter | None = None,
        monitor_thread_interval: datetime.timedelta = timedelta(seconds=1),
        monitor_process_interval: datetime.timedelta = timedelta(seconds=1),
        heartbeat_interval: datetime.timedelta = timedelta(seconds=1),
        progress_watchdog_interval: datetime.timedelta = timedelta(seconds=1),
        soft_timeout: datetime.timedelta = timedelta(seconds=60),
        hard_timeout: datetime.timedelta = timedelta(seconds=90),
        heartbeat_timeout: datetime.timedelta = timedelta(seconds=30),
        barrier_timeout: datetime.timedelta = timedelta(seconds=120),
        completion_timeout: datetime.timedelta = timedelta(seconds=120),
        last_call_wait: datetime.timedelta = timedelta(seconds=1),
        termination_grace_time: datetime.timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        policies: dict[str, tuple[Any, type, Callable[[Any], Any]]] = {
            "initialize": (initialize, Initialize, _adapter(Initialize)),
            "abort": (abort, Abort, _Abort),
            "finalize": (finalize, Finalize, _adapter(CoreFinalize, _WithError)),
            "health_check": (health_check, HealthCheck, _adapter(CoreHealthCheck, _WithError)),
            "rank_filter": (rank_filter, RankFilter, _RankFilter),
            "completion": (completion, Completion, _adapter(Completion)),
            "terminate": (terminate, Terminate, _adapter(Terminate)),
        }
        adapted: dict[str, Any] = {}
        for name, (value, kind, adapter) in policies.items():
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, not {value!r}")
            adapted[name] = None if value is None else adapter(value)
        if not isinstance(rank_assignment, RankAssignment):
            raise TypeError(f"rank_assignment must be a RankAssignment, not {rank_assignment!r}")
        intervals = {
            "monitor_process_interval": monitor_process_interval,
            "heartbeat_interval": heartbeat_interval,
        }
        for name, interval in intervals.items():
            if not isinstance(interval, timedelta):
                raise TypeError(f"{name} must be a datetime.timedelta, not {interval!r}")
        if rank_filter is not None:
            warnings.warn(
                "rank_filter is deprecated: use rank_assignment", DeprecationWarning, stacklevel=2
            )
        self.enabled, self.rank_assignment = enabled, rank_assignment
        vars(self).update(intervals, **{name: value for name, (value, *_) in policies.items()})
        self._core = CoreWrapper(
            store_factory=store_factory,
            store_kwargs=store_kwargs,
            rank_assignment=as_core(rank_assignment),
            monitor_thread_interval=monitor_thread_interval,
            monitor_process_interval=min(intervals.values()),
            progress_watchdog_interval=progress_watchdog_interval,
            soft_timeout=soft_timeout,
            hard_timeout=hard_timeout,
            heartbeat_timeout=heartbeat_timeout,
            barrier_timeout=barrier_timeout,
            completion_timeout=completion_timeout,
            last_call_wait=last_call_wait,
            termination_grace_time=termination_grace_time,
            monitor_process_logfile=monitor_process_logfile,
            enabled=enabled,
            repeated_faults=None,
            **adapted,
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_core":  # not made yet
            raise AttributeError(name)
        return getattr(self._core, name)

    def __call__(self, function: F) -> F:
        if not self.enabled:
            return function
        parameter = inspect.signature(function).parameters.get(_BY_NAME)
        if parameter is None or "CallWrapper" in str(parameter.annotation):
            return cast(F, self._core(function))

        def named(args: Any, kwargs: Any, call: CallWrapper) -> Any:
            return function(*args, **{**kwargs, _BY_NAME: call})

        restarted: Any = self._core(named)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return restarted(args, kwargs)

        return wrapped  # type: ignore[return-value]


class _Adapter:
    """A policy of 0.4 for `outlast.inprocess`: it gets a `FrozenState`, its result is not used."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        return repr(self._policy)

    def __call__(self, state: State) -> State:
        self._policy(from_core(state).freeze())
        return state


def _adapter(kind: type, base: type[_Adapter] = _Adapter) -> Callable[[Any], Any]:
    """Makes of a policy of 0.4 one of this kind."""
    return type(f"_{kind.__name__}", (base, kind), {})


class _Abort(_Adapter, Abort):
    """Also calls the hooks of its parts."""

    def __call__(self, state: State) -> State:
        run_all(iter_parts(self._policy), from_core(state).freeze())
        return state

    def prepare(self) -> None:
        for part in self._parts():
            part.prepare()

    def again(self, state: State) -> None:
        for part in self._parts():
            part.again(state)

    def _parts(self) -> list[Abort]:
        return [part for part in iter_parts(self._policy) if isinstance(part, Abort)]


class _WithError(_Adapter):
    def __call__(  # type: ignore[override]
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        self._policy(from_core(state, train_ex).freeze())
        return state, train_ex


class _RankFilter(_Adapter, CoreRankFilter):
    def __call__(self, state: State) -> State:
        found = self._policy(from_core(state))
        size = getattr(found, "active_world_size", None)
        if size is None:
            raise TypeError(f"{self!r} must return the state, not {found!r}")
        status = state.status if state.rank < size else Status.INACTIVE
        return state.copy(active_world_size=size, status=status)
