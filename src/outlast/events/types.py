"""The types of events.

Every event carries the iteration, the member (one process of the job, with a permanent ID), its
rank at that moment, host, process ID and monotonic time. Durations are measured only by spans (see
`emitter.py`) and are in `seconds`.
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
    "CopyCompleted",
    "CopySkipped",
    "Entered",
    "Event",
    "Fault",
    "FinalizeDone",
    "HealthCheckDone",
    "HostJoined",
    "HostLost",
    "InitializeDone",
    "InterruptSent",
    "InterruptSwallowed",
    "Joined",
    "LeftFunction",
    "Lost",
    "MonitorRestarted",
    "Note",
    "NothingToRestore",
    "Seen",
    "StepsDone",
    "StopRequested",
    "WorkerExited",
    "WorkerFailed",
    "WorkerStarted",
    "event_from_dict",
    "event_to_dict",
]

EVENT_TYPES: dict[str, type[Event]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of every event.

    Attributes:
        iteration: the restart wrapper's iteration; -1 before the first.
        member: permanent ID of the process in the job; -1 if it has none (a launcher).
        rank: the member's rank in this iteration; -1 if it has none.
        host: name of the host.
        pid: ID of the process that wrote the event.
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
    """A fault of `member`, as reported by its own process or its monitor.

    `interruption` is a name of `outlast.inprocess.attribution.Interruption`. `consequence` is true
    if the fault looks like the consequence of another one (a peer's closed connection). For a hung
    rank, `testimony` is true if the rank itself reports it, `pings` and `collectives` give its
    progress (see `hang_report.py`), and `idle` is how long it had made none, in seconds.
    """

    interruption: str = ""
    cause: str = ""
    traceback: str = ""
    consequence: bool = False
    testimony: bool = False
    pings: int = 0
    collectives: int = -1
    idle: float = 0.0


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
    """The thread left the training function. `outcome`: returned, raised, interrupted. `pings` is
    the number of calls of `CallWrapper.ping` in this iteration.
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
    complete(tion), replacements (the wait for the replacements of lost ranks).
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event, kind="worker_started"):
    """The launcher started a process. `attempt` counts from 0 for each local rank. `standby`:
    whether it was a standby process before.
    """

    worker_pid: int = -1
    attempt: int = 0
    standby: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerExited(Event, kind="worker_exited"):
    """A process of the launcher ended; `exit_code` is negative for a signal."""

    worker_pid: int = -1
    exit_code: int = 0
    last_words: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event, kind="worker_failed"):
    """A process of the launcher failed, and what the launcher did: `decision` is a value of
    `outlast.launch.agent.decisions.Decision`. `failed_time` is when the process failed, which may
    be before its end; `message` is the last line of its traceback or of its standard error.
    """

    worker_pid: int = -1
    exit_code: int = 0
    decision: str = ""
    failed_time: float = 0.0
    message: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested(Event, kind="stop_requested"):
    """The whole job was told to stop; the launcher or each rank of a `Job` writes it."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostJoined(Event, kind="host_joined"):
    """A launcher has learned that a host has joined the job."""

    host_id: str = ""
    name: str = ""
    address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLost(HostJoined, kind="host_lost"):
    """A launcher has learned that a host is lost, or has `left` in an orderly way."""

    reason: str = ""
    left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsDone(Event, kind="steps_done"):
    """This rank has completed the steps after `first` up to and including `last`; `Job` writes it
    every few seconds and when it ends, with the same `first`.
    """

    first: int = 0
    last: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event, kind="checkpoint_committed"):
    """A checkpoint is durable and visible, on all ranks.

    `size_bytes` is the total, `own_bytes` this rank's part. `blocked_seconds` is how long `save`
    blocked training, `seconds` how long the commit took, `queued` the number of saves behind it.
    """

    step: int = -1
    size_bytes: int = 0
    own_bytes: int = 0
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A save failed on all ranks. Nothing of it is visible."""

    step: int = -1
    cause: str = ""
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRestored(Event, kind="checkpoint_restored"):
    """All ranks loaded a checkpoint. `source`: memory, copies, storage.

    With copies, some ranks' snapshots were fetched from the memory of another host: `fetched_bytes`
    by this rank, from host `held_by`.
    """

    step: int = -1
    source: str = ""
    seconds: float = 0.0
    fetched_bytes: int = 0
    held_by: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NothingToRestore(Event, kind="nothing_to_restore"):
    """A restore found no checkpoint: training begins with the initial state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver(Event, kind="checkpoint_passed_over"):
    """A checkpoint was skipped by a load because it is incomplete or damaged."""

    step: int = -1
    source: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Event, kind="checkpoint_removed"):
    """The retention policy removed a checkpoint."""

    step: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCompleted(Event, kind="copy_completed"):
    """All ranks' snapshots of a step are in the memory of other hosts too; this rank's on host
    `held_by`. `seconds` is the time from the save.
    """

    step: int = -1
    own_bytes: int = 0
    seconds: float = 0.0
    held_by: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySkipped(Event, kind="copy_skipped"):
    """A snapshot was not copied to the memory of other hosts, on no rank."""

    step: int = -1
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note(Event, kind="note"):
    """Anything else, by name, with numbers or text in `data`."""

    name: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain values, with its kind under `"kind"`."""
    fields = dataclasses.fields(event)
    return {"kind": event.kind, **{field.name: getattr(event, field.name) for field in fields}}


def event_from_dict(values: dict[str, Any]) -> Event:
    """The inverse of `event_to_dict`. Unknown fields are ignored, so that the log of a newer
    version can be read.

    Raises:
        EventLogError: if the kind is missing or unknown.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise EventLogError(f"unknown kind of event: {kind!r}; known: {sorted(EVENT_TYPES)}")
    event_type = EVENT_TYPES[kind]
    known = {f.name for f in dataclasses.fields(event_type)}
    return event_type(**{name: value for name, value in values.items() if name in known})
