"""The types of events. Durations are in `seconds`, and measured only by spans (`emitter.py`)."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from outlast.events.event import Event

# Restarts in place: faults, the phases of the recovery, ranks and members.


class Fault(Event, kind="fault"):
    """A fault of `member`, as reported by its own process or its monitor.

    `interruption` is a name of `restart_causes.Interruption`. `consequence` is true
    if the fault looks like the consequence of another one (a peer's closed connection), and
    `overtaken` if a restart interrupted the function before the exception had left it. `where` is
    the user's line that raised the exception, as `train.py:42 in step`. For a hung rank,
    `own_report` is true if the rank itself reports it, `pings`, `collectives` and `groups` give its
    progress (see `hung_ranks`), and `idle` is how long it had made none, in seconds; `made`,
    `passes` and `loop_at` say where its training loop is (`coordination.training_step.Loop`).
    """

    interruption: str = ""
    cause: str = ""
    traceback: str = ""
    consequence: bool = False
    overtaken: bool = False
    own_report: bool = False
    pings: int = 0
    collectives: int = -1
    groups: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    idle: float = 0.0
    where: str = ""
    made: int = -1
    passes: int = 0
    loop_at: str = ""


class Seen(Event, kind="seen"):
    """This rank learned that the iteration must end."""

    reason: str = ""


class Decided(Event, kind="decided"):
    """The members have agreed on what follows this iteration; two of them write it.

    `cause` is the first cause, `None` if no rank failed. `lost` are the members of the iteration
    that are out of the job, each with its rank, and `joined` the new ones. `size` is the world size
    of the iteration, and `members` how many go on, before the rank assignment; none do if it `ends`
    the job. `reached` says after which fact it was made: all arrived, a loss, a request, a timeout.
    """

    cause: Fault | None = None
    lost: list[tuple[int, int]] = field(default_factory=list, hash=False)
    joined: list[int] = field(default_factory=list, hash=False)
    size: int = 0
    members: int = 0
    ends: bool = False
    reached: str = ""


class AbortDone(Event, kind="abort"):
    """In-flight collectives were aborted from another thread."""

    seconds: float = 0.0
    error: str = ""


class InterruptSent(Event, kind="interrupt"):
    """The thread in the training function was interrupted. `how`: signal or async."""

    how: str = ""


class InterruptSwallowed(Event, kind="interrupt_swallowed"):
    """User code caught the interrupt and continued; `where` is its location."""

    where: str = ""


class LeftFunction(Event, kind="left_function"):
    """The thread left the training function. `outcome`: returned, raised, interrupted; raised also
    if the interrupt overtook an exception. `pings` is the number of calls of `CallWrapper.ping` in
    this iteration.
    """

    outcome: str = ""
    pings: int = 0


class InitializeDone(Event, kind="initialize"):
    """The initialize function ran."""

    seconds: float = 0.0


class FinalizeDone(Event, kind="finalize"):
    """torch.distributed was shut down and the finalize function ran."""

    seconds: float = 0.0


class HealthCheckDone(Event, kind="health_check"):
    """The health check ran."""

    seconds: float = 0.0


class BarrierPassed(Event, kind="barrier"):
    """A barrier was passed, or a wait of the restart ended. `name`: start, term(ination),
    complete(tion), replacements (the wait for the replacements of lost ranks), links (the wait for
    the launchers, which look for a broken link between hosts).
    """

    name: str = ""
    seconds: float = 0.0


class Assigned(Event, kind="assigned"):
    """This member was assigned its rank in the iteration; `rank` is the new one."""

    world_size: int = 0
    active_world_size: int = 0
    active: bool = True
    seconds: float = 0.0


class Entered(Event, kind="entered"):
    """This rank enters the training function (or the wait of a reserve rank)."""

    active: bool = True


class Joined(Event, kind="joined"):
    """A new process asks to join."""

    preferred_rank: int = -1


class Admitted(Event, kind="admitted"):
    """A process that asked to join is in the view of this iteration."""

    seconds: float = 0.0


class Lost(Event, kind="lost"):
    """A member is no longer in the job; `reason` says why. `moved`: it has left in order."""

    reason: str = ""
    moved: bool = False


class Completed(Event, kind="completed"):
    """Every rank has completed the function; this one returns its value."""


class MonitorRestarted(Event, kind="monitor_restarted"):
    """The monitor process of this rank died and was restarted."""


# Launchers: their worker processes, and the hosts of the job.


class LauncherStarted(Event, kind="launcher_started"):
    """The launcher of this host begins the job `run_id`; `command` is the script and its arguments
    as one would type them.
    """

    run_id: str = ""
    command: str = ""


class WorkerStarted(Event, kind="worker_started"):
    """The launcher started a process. `attempt` counts from 0 for each local rank. `standby`:
    whether it was a standby process before.
    """

    worker_pid: int = -1
    attempt: int = 0
    standby: bool = False


class WorkerExited(Event, kind="worker_exited"):
    """A process of the launcher ended; `exit_code` is negative for a signal."""

    worker_pid: int = -1
    exit_code: int = 0
    last_words: str = ""


class WorkerFailed(Event, kind="worker_failed"):
    """A process of the launcher failed, and what the launcher decided. `failed_time` may be before
    its end; `message` is the last line of its traceback or of its standard error.
    """

    worker_pid: int = -1
    exit_code: int = 0
    decision: str = ""
    failed_time: float = 0.0
    message: str = ""


class HostJoined(Event, kind="host_joined"):
    """A launcher has learned that a host has joined the job."""

    host_id: str = ""
    name: str = ""
    address: str = ""


class HostLost(HostJoined, kind="host_lost"):
    """A launcher has learned that a host is lost, or has `left` in an orderly way."""

    reason: str = ""
    left: bool = False


class HostLeaving(HostJoined, kind="host_leaving"):
    """A launcher has learned that a host is to leave in order; then also the name of the host `to`
    which its ranks move, `nobody` if to none; or that it `stays`.
    """

    reason: str = ""
    to: str = ""
    stays: bool = False


class LauncherEnded(Event, kind="launcher_ended"):
    """The job is over and its launcher on this host exits with `exit_code`; `cause` says why it has
    failed, in one line. `last_lines` are those that it prints. A launcher that was killed writes
    none.
    """

    exit_code: int = 0
    cause: str = ""
    last_lines: str = ""


class PlannedFault(Event, kind="planned_fault"):
    """A fault of the plan of `outlast run --chaos`, written by the launcher when the job ends.

    If it has `fired`, the other fields of the event say where and when. If not, `rank` is the
    planned one. `name` is its kind, `key` its position in the plan, `due` its conditions in words.
    """

    key: str = ""
    name: str = ""
    due: str = ""
    fired: bool = False


# The training itself.


class StopRequested(Event, kind="stop_requested"):
    """The whole job was told to stop; the launcher or each rank of a `Job` writes it."""

    reason: str = ""


class StepsDone(Event, kind="steps_done"):
    """This rank has completed the steps after `first` up to and including `last`; `Job` writes it
    every few seconds and when it ends, with the same `first`. `cpu_seconds` is the CPU time of the
    training thread meanwhile: of the rank's own work, without waits.
    """

    first: int = 0
    last: int = 0
    cpu_seconds: float = 0.0


# Checkpoints.


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


class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A save failed on all ranks. Nothing of it is visible."""

    step: int = -1
    cause: str = ""
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


class CheckpointRestored(Event, kind="checkpoint_restored"):
    """All ranks loaded a checkpoint. `source`: memory, copies, storage.

    With copies, some ranks' snapshots were fetched from the memory of another host: `fetched_bytes`
    by this rank, from host `held_by`. `not_live`: after a fault, why no rank's state was used.
    """

    step: int = -1
    source: str = ""
    seconds: float = 0.0
    fetched_bytes: int = 0
    held_by: str = ""
    not_live: str = ""


class NothingToRestore(Event, kind="nothing_to_restore"):
    """A restore found no checkpoint: training begins with the initial state."""


class CheckpointPassedOver(Event, kind="checkpoint_passed_over"):
    """A checkpoint was skipped by a load because it is incomplete or damaged."""

    step: int = -1
    source: str = ""
    cause: str = ""


class CheckpointRemoved(Event, kind="checkpoint_removed"):
    """The retention policy removed a checkpoint."""

    step: int = -1


class CopyCompleted(Event, kind="copy_completed"):
    """All ranks' snapshots of a step are in the memory of other hosts too; this rank's on host
    `held_by`. `seconds` is the time from the save.
    """

    step: int = -1
    own_bytes: int = 0
    seconds: float = 0.0
    held_by: str = ""


class CopySkipped(Event, kind="copy_skipped"):
    """A snapshot was not copied to the memory of other hosts, on no rank."""

    step: int = -1
    cause: str = ""


# Faults that raise no error.


class ReplicaMismatch(Event, kind="replica_mismatch"):
    """Ranks that must hold the same parameters hold different ones; one rank writes it.

    `ranks` on `hosts` differ from the majority of the `replicas` ranks; without a `majority`, these
    ranks differ from one another. The difference was seen after `step`, and was not there after
    `clean_step`. `parameters` names where.
    """

    step: int = -1
    clean_step: int = -1
    replicas: int = 0
    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    majority: bool = False
    parameters: list[str] = field(default_factory=list)


class StragglerFound(Event, kind="straggler_found"):
    """Rank `straggler` on host `straggler_host` is slower than the other ranks; rank 0 writes it.

    `seconds` is its time of a step, without waiting for other ranks, and `typical_seconds` that of
    the other ranks, each a median; it was seen in `windows` windows in a row, the last of which
    ended after `step`.
    """

    step: int = -1
    straggler: int = -1
    straggler_host: str = ""
    seconds: float = 0.0
    typical_seconds: float = 0.0
    windows: int = 0


class NonFiniteFound(Event, kind="non_finite_found"):
    """A loss or parameters were not finite after `step`; each rank that finds it writes it.

    It was first seen on rank `first` on host `first_host`: in its `origin` ("loss", "gradients" or
    "parameters"). `parameters` names those that are not finite; they were after step `since`.
    """

    step: int = -1
    since: int = -1
    first: int = -1
    first_host: str = ""
    origin: str = ""
    parameters: list[str] = field(default_factory=list)


class BatchesSkipped(Event, kind="batches_skipped"):
    """Values were not finite after step `found`: training goes back to `step`, and leaves out the
    batches between; rank 0 writes it. `samples` of all ranks (-1: unknown); done `times` in a row.
    """

    step: int = -1
    found: int = -1
    samples: int = -1
    times: int = 0
