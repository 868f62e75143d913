"""The validated arguments of the wrapper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.coordination.decisions.repeated_faults import RepeatedFaults
from outlast.inprocess.abort import Abort
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import HealthCheck
from outlast.inprocess.initialize import Initialize, RetryController
from outlast.inprocess.rank_assignment import AwaitReplacements, RankAssignment
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.store import FileStore, PrefixStore, StoreMixin, TCPStore
from outlast.inprocess.timeouts import Timeouts
from outlast.system.arguments import as_timedelta, check_options, options_of, seconds


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `Wrapper`, which documents them.

    Raises:
        TypeError, ValueError: naming the invalid argument.
    """

    store_factory: Callable[..., Any]
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
        self._check_parts()
        logfile = self.monitor_process_logfile
        if logfile is not None:
            if not isinstance(logfile, str):
                raise TypeError(
                    f"monitor_process_logfile must be a string, not {type(logfile).__name__}"
                )
            if not Path(logfile).is_absolute():
                raise ValueError(f"monitor_process_logfile must be an absolute path: {logfile!r}")

    @property
    def await_replacements(self) -> float | None:
        """The seconds for which a restart is held for replacements; `None` if it is not held."""
        for part in assignment_parts(self.rank_assignment):
            if isinstance(part, AwaitReplacements):
                return seconds(part.timeout)
        return None

    @property
    def stops_repeated_faults(self) -> RepeatedFaults | None:
        """The policy for repeated faults; `None` if they never end the job, or if a
        `RetryController` decides.
        """
        parts = () if self.initialize is None else iter_parts(self.initialize)
        overridden = any(isinstance(part, RetryController) for part in parts)
        return None if overridden else self.repeated_faults

    def _check_parts(self) -> None:
        factory = self.store_factory
        if not (isinstance(factory, type) and issubclass(factory, StoreMixin)):
            raise TypeError(f"store_factory must be a subclass of StoreMixin, not {factory!r}")
        if issubclass(factory, PrefixStore):
            raise ValueError(
                "store_factory must open a connection at each call, but all PrefixStores over one "
                "store share its connection: pass the factory of that store; each call of a "
                "wrapped function has its own prefix anyway"
            )
        if not isinstance(self.store_kwargs, Mapping):
            raise TypeError(f"store_kwargs must be a dict, not {type(self.store_kwargs).__name__}")
        if factory in (TCPStore, FileStore):
            check_options(factory.__name__, self.store_kwargs, options_of(factory))
        if "timeout" in self.store_kwargs:
            as_timedelta("store_kwargs['timeout']", self.store_kwargs["timeout"])
        kinds: dict[str, tuple[type, bool]] = {
            "initialize": (Initialize, True),
            "abort": (Abort, True),
            "finalize": (Finalize, True),
            "health_check": (HealthCheck, True),
            "rank_assignment": (RankAssignment, False),
            "rank_filter": (RankFilter, True),
            "grow_policy": (GrowPolicy, False),
            "completion": (Completion, True),
            "terminate": (Terminate, True),
            "repeated_faults": (RepeatedFaults, True),
        }
        for name, (kind, optional) in kinds.items():
            value = getattr(self, name)
            if not (isinstance(value, kind) or (optional and value is None)):
                wanted = f"{kind.__name__}{' or None' if optional else ''}"
                raise TypeError(f"{name} must be an instance of {wanted}, not {value!r}")


def assignment_parts(assignment: RankAssignment) -> list[RankAssignment]:
    """The assignments that `assignment` is composed of, in the order of their calls."""
    return [part for part in iter_parts(assignment) if isinstance(part, RankAssignment)]
