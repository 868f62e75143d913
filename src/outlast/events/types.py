"""The facts that are recorded, a type each.

An event says what happened where: every one carries the iteration, the member (one process of
the job, with an id for life), its rank at that moment, host, process id and monotonic time.
Durations are measured by spans only (see `emitter.py`) and stand in `seconds`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from outlast.errors import EventLogError

__all__ = [
    "EVENT_TYPES",
    "AbortDone",
    "Admitted",
    "Assigned",
    "BarrierPassed",
    "CheckpointCommitted",
    "CheckpointFailed",
    "CheckpointPassedOver",
    "CheckpointRemoved",
    "CheckpointRestored",
    "Completed",
    "Entered",
    "Event",
    "Fault",
    "FinalizeDone",
    "HealthCheckDone",
    "InitializeDone",
    "InterruptSent",
    "InterruptSwallowed",
    "Joined",
    "LeftFunction",
    "Lost",
    "MonitorRestarted",
    "Note",
    "Seen",
    "WorkerExited",
    "WorkerStarted",
    "event_from_dict",
    "event_to_dict",
]

EVENT_TYPES: dict[str, type[Event]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What every event says.

    Attributes:
        iteration: of the restart wrapper; -1 before the first.
        member: id of the process in the job, for life; -1 where it has none (a launcher).
        rank: its place in this iteration; -1 where it has none.
        host: name of the host.
        pid: id of the process that wrote the event.
        time: monotonic seconds, comparable only between processes of one host.
    """

    kind: ClassVar[str] = "event"

    iteration: int = -1
    member: int = -1
    rank: int = -1
    host: str = ""
    pid: int = -1
    time: float = 0.0

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        EVENT_TYPES[kind] = cls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault(Event, kind="fault"):
    """A fault of `member`, as its own process or its monitor reports it.

    `interruption` is a name of `outlast.inprocess.attribution.Interruption`; `consequence` says
    that this fault looks like the echo of another one (a peer's closed connection). Of a rank that
    stood still, `testimony` says that it tells so itself, `pings` and `collectives` how far it had
    come (see `culprit.py`).
    """

    interruption: str = ""
    cause: str = ""
    traceback: str = ""
    consequence: bool = False
    testimony: bool = False
    pings: int = 0
    collectives: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen(Event, kind="seen"):
    """This rank learned that the iteration is to end."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbortDone(Event, kind="abort"):
    """In-flight work was ended from another thread."""

    seconds: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptSent(Event, kind="interrupt"):
    """The thread in the training function was told to leave it. `how`: signal or async."""

    how: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptSwallowed(Event, kind="interrupt_swallowed"):
    """User code caught the interrupt and went on; `where` is the place it was in."""

    where: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftFunction(Event, kind="left_function"):
    """The thread is out of the training function. `outcome`: returned, raised, interrupted."""

    outcome: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializeDone(Event, kind="initialize"):
    """The initialize function ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalizeDone(Event, kind="finalize"):
    """torch.distributed was released and the finalize function ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthCheckDone(Event, kind="health_check"):
    """The health check ran."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierPassed(Event, kind="barrier"):
    """A barrier was passed. `name`: start, term(ination), complete(tion)."""

    name: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assigned(Event, kind="assigned"):
    """This member has its place in the iteration; `rank` is the new one."""

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
    """A new process asks to take part."""

    preferred_rank: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admitted(Event, kind="admitted"):
    """A process that asked to join is in the view of this iteration."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost(Event, kind="lost"):
    """A member is out of the job. `reason` says why."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed(Event, kind="completed"):
    """Every rank has completed the function; this one returns its value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorRestarted(Event, kind="monitor_restarted"):
    """The monitor process of this rank was lost and started anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event, kind="worker_started"):
    """The launcher started a process. `attempt` counts from 0 for each local rank."""

    worker_pid: int = -1
    attempt: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerExited(Event, kind="worker_exited"):
    """A process of the launcher ended; `exit_code` is negative for a signal."""

    worker_pid: int = -1
    exit_code: int = 0
    last_words: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event, kind="checkpoint_committed"):
    """A checkpoint is durable and visible, on all ranks.

    `size_bytes` is of the whole, `own_bytes` of this rank's part; `blocked_seconds` is how long
    `save` held the training up, `seconds` how long until the commit; `queued` saves are behind it.
    """

    step: int = -1
    size_bytes: int = 0
    own_bytes: int = 0
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A save failed, on all ranks. Nothing of it is visible."""

    step: int = -1
    cause: str = ""
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRestored(Event, kind="checkpoint_restored"):
    """All ranks have loaded a checkpoint. `source`: memory, storage."""

    step: int = -1
    source: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver(Event, kind="checkpoint_passed_over"):
    """A checkpoint was not loaded, because it is not whole or not what was written."""

    step: int = -1
    source: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Event, kind="checkpoint_removed"):
    """The retention policy had a checkpoint removed."""

    step: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note(Event, kind="note"):
    """A fact of another room, by name, with numbers or words (`data`)."""

    name: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain values, with its kind under `"kind"`."""
    return {"kind": event.kind, **{f.name: getattr(event, f.name) for f in _fields(event)}}


def event_from_dict(values: dict[str, Any]) -> Event:
    """The event that `event_to_dict` made `values` of. Unknown fields are left out, so that a log
    written by a newer version is still read.

    Raises:
        EventLogError: if the kind is missing or unknown.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise EventLogError(f"unknown kind of event: {kind!r}; known: {sorted(EVENT_TYPES)}")
    event_type = EVENT_TYPES[kind]
    known = {f.name for f in dataclasses.fields(event_type)}
    return event_type(**{name: value for name, value in values.items() if name in known})


def _fields(event: Event) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(event)
