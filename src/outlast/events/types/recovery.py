"""The events of a restart in place: faults, the phases of the recovery, ranks and members."""

from __future__ import annotations

import dataclasses

from outlast.events.types.base import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault(Event, kind="fault"):
    """A fault of `member`, as reported by its own process or its monitor.

    `interruption` is a name of `outlast.inprocess.attribution.Interruption`. `consequence` is true
    if the fault looks like the consequence of another one (a peer's closed connection), and
    `overtaken` if a restart interrupted the function before the exception had left it. For a hung
    rank, `testimony` is true if the rank itself reports it, `pings` and `collectives` give its
    progress (see `hang_report.py`), and `idle` is how long it had made none, in seconds. `where` is
    the user's line that raised the exception, as `train.py:42 in step`.
    """

    interruption: str = ""
    cause: str = ""
    traceback: str = ""
    consequence: bool = False
    overtaken: bool = False
    testimony: bool = False
    pings: int = 0
    collectives: int = -1
    idle: float = 0.0
    where: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen(Event, kind="seen"):
    """This rank learned that the iteration must end."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbortDone(Event, kind="abort"):
    """In-flight collectives were aborted from another thread."""

    seconds: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptSent(Event, kind="interrupt"):
    """The thread in the training function was interrupted. `how`: signal or async."""

    how: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptSwallowed(Event, kind="interrupt_swallowed"):
    """User code caught the interrupt and continued; `where` is its location."""

    where: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftFunction(Event, kind="left_function"):
    """The thread left the training function. `outcome`: returned, raised, interrupted; raised also
    if the interrupt overtook an exception. `pings` is the number of calls of `CallWrapper.ping` in
    this iteration.
    """

    outcome: str = ""
    pings: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializeDone(Event, kind="initialize"):
    """The initialize function ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalizeDone(Event, kind="finalize"):
    """torch.distributed was shut down and the finalize function ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthCheckDone(Event, kind="health_check"):
    """The health check ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierPassed(Event, kind="barrier"):
    """A barrier was passed, or a wait of the restart ended. `name`: start, term(ination),
    complete(tion), replacements (the wait for the replacements of lost ranks), links (the wait for
    the launchers, which look for a broken link between hosts).
    """

    name: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assigned(Event, kind="assigned"):
    """This member was assigned its rank in the iteration; `rank` is the new one."""

    world_size: int = 0
    active_world_size: int = 0
    active: bool = True
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entered(Event, kind="entered"):
    """This rank enters the training function (or the wait of a reserve rank)."""

    active: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined(Event, kind="joined"):
    """A new process asks to join."""

    preferred_rank: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admitted(Event, kind="admitted"):
    """A process that asked to join is in the view of this iteration."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost(Event, kind="lost"):
    """A member is no longer in the job; `reason` says why."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed(Event, kind="completed"):
    """Every rank has completed the function; this one returns its value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorRestarted(Event, kind="monitor_restarted"):
    """The monitor process of this rank died and was restarted."""
