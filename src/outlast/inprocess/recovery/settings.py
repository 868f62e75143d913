"""The validated arguments of the wrapper, and what follows from them for a restart."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outlast.coordination.decision import Rules
from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.inprocess.abort import Abort
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.environment import Launch
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import HealthCheck
from outlast.inprocess.initialize import Initialize, RetryController
from outlast.inprocess.rank_assignment import AwaitReplacements, RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.store import FileStore, PrefixStore, StoreMixin, TCPStore
from outlast.inprocess.timeouts import Durations, Timeouts
from outlast.system.arguments import as_timedelta, check_options, options_of, seconds

# `outlast run` says when a rank will not be replaced. This limit is for a replacement that hangs
# before it asks to join. It is longer than the longest back-off plus a slow start of Python.
_REPLACEMENT_LIMIT_S = 600.0

_NO_POLICIES = ("store_factory", "store_kwargs", "monitor_process_logfile")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `Wrapper`, which documents them, and what it raises."""

    store_factory: type[StoreMixin]
    store_kwargs: Mapping[str, Any]
    initialize: Initialize | None
    abort: Abort | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    rank_assignment: RankAssignment
    rank_filter: RankFilter | None
    timeouts: Timeouts
    monitor_process_logfile: str | None
    grow_policy: GrowPolicy
    repeated_faults: RepeatedFaults | None
    completion: Completion | None = None
    terminate: Terminate | None = None

    def __post_init__(self) -> None:
        self._check_store()
        for name, hint in typing.get_type_hints(Settings).items():
            kind, *optional = typing.get_args(hint) or (hint,)
            value = getattr(self, name)
            if name not in _NO_POLICIES and not isinstance(value, hint):
                wanted = f"{kind.__name__}{' or None' if optional else ''}"
                raise TypeError(f"{name} must be an instance of {wanted}, not {value!r}")
        logfile = self.monitor_process_logfile
        if not isinstance(logfile, str | None):
            raise TypeError(
                f"monitor_process_logfile must be a string, not {type(logfile).__name__}"
            )
        if logfile is not None and not Path(logfile).is_absolute():
            raise ValueError(f"monitor_process_logfile must be an absolute path: {logfile!r}")

    def _check_store(self) -> None:
        factory, kwargs = self.store_factory, self.store_kwargs
        if not (isinstance(factory, type) and issubclass(factory, StoreMixin)):  # type: ignore[redundant-expr]
            raise TypeError(f"store_factory must be a subclass of StoreMixin, not {factory!r}")
        if issubclass(factory, PrefixStore):
            raise ValueError(
                "store_factory must open a connection at each call, but all PrefixStores over one "
                "store share its connection: pass the factory of that store; each call of a "
                "wrapped function has its own prefix anyway"
            )
        if not isinstance(kwargs, Mapping):
            raise TypeError(f"store_kwargs must be a dict, not {type(kwargs).__name__}")
        if factory in (TCPStore, FileStore):
            check_options(factory.__name__, kwargs, options_of(factory))
        if "timeout" in kwargs:
            as_timedelta("store_kwargs['timeout']", kwargs["timeout"])

    @functools.cached_property
    def abort_parts(self) -> list[Abort]:
        parts = () if self.abort is None else iter_parts(self.abort)
        return [part for part in parts if isinstance(part, Abort)]

    @functools.cached_property
    def assignments(self) -> list[RankAssignment]:
        """Those that the rank assignment is composed of, in the order of their calls."""
        parts = iter_parts(self.rank_assignment)
        return [part for part in parts if isinstance(part, RankAssignment)]

    @functools.cached_property
    def await_replacements(self) -> float | None:
        """The seconds for which a restart is held for replacements, if `AwaitReplacements` says."""
        for part in self.assignments:
            if isinstance(part, AwaitReplacements):
                return seconds(part.timeout)
        return None

    @property
    def keeps_reserve(self) -> bool:
        reserve = any(part.keeps_reserve for part in self.assignments)
        return self.rank_filter is not None or reserve

    def hold(self, launch: Launch) -> tuple[int, float]:
        """The number of members for which a restart is held, and for how many seconds; 0 for none.

        `AwaitReplacements` decides, if there is one. Otherwise a restart is held under
        `outlast run`, which replaces lost ranks, unless no replacement would be admitted. Where
        reserve ranks take over, it is held only if fewer are left than were active.
        """
        chosen_s = self.await_replacements
        if chosen_s is not None:
            return (launch.world_size if chosen_s else 0), chosen_s
        admits = self.grow_policy is not GrowPolicy.NEVER
        held = launch.agent and admits
        return (launch.world_size, _REPLACEMENT_LIMIT_S) if held else (0, 0.0)

    def rules(self, launch: Launch) -> Rules:
        """On what decisions depend. A `RetryController` decides in place of `repeated_faults`."""
        parts = () if self.initialize is None else iter_parts(self.initialize)
        overridden = any(isinstance(part, RetryController) for part in parts)
        return Rules(
            grow=self.grow_policy is not GrowPolicy.NEVER,
            repeated=None if overridden else self.repeated_faults,
            await_size=self.hold(launch)[0],
            reserve=self.keeps_reserve and self.await_replacements is None,
            chosen_s=self.await_replacements or 0.0,
            hosts=bool(launch.host_id),
        )

    def durations(self, launch: Launch) -> Durations:
        return dataclasses.replace(self.timeouts.in_seconds(), hold=self.hold(launch)[1])
