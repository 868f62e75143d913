"""The report as plain dataclasses: the restarts, the phases of each, and the totals.

Every time `at` is in seconds from the first event of the host on which it happened, since the
monotonic clocks of two hosts have nothing in common. An unknown duration is `None`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One fault: on which rank, of which kind, and when.

    Attributes:
        rank: the member's rank in the iteration that the fault ended.
        interruption: a name of `outlast.inprocess.attribution.Interruption`.
        message: the fault's message.
        pid: the process; -1 if it is not known.
        launcher_rank: the rank in the launcher's messages, which never changes; -1 if the launcher
            did not record it.
        exit: how the process ended ("killed by SIGKILL"), if the launcher recorded it.
        consequence: whether it looks like the consequence of another fault (a peer's closed
            connection).
    """

    rank: int
    member: int
    host: str
    interruption: str
    message: str
    traceback: str = ""
    exit: str = ""
    consequence: bool = False
    at: float = 0.0
    pid: int = -1
    launcher_rank: int = -1


@dataclass(frozen=True, kw_only=True)
class Party:
    """A member that was lost (`rank` is its last one) or that joined (`rank` is its first)."""

    rank: int
    member: int
    host: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Durations of the phases of one restart, in seconds.

    Each is the slowest survivor's, except that the barriers are those of the last to arrive, since
    the others wait for that survivor rather than for the barrier.

    Attributes:
        detection: from the fault until the last survivor on the same host has seen it.
        interrupt: from the end of the abort until the function is left.
        health_check: after the fault and before the function is entered again.
        total: from the fault until the last survivor on the same host is in the function again.
        total_from_seen: whether `total` starts where the fault was first seen, because no
            survivor shares a host with the fault.
    """

    detection: float | None = None
    abort: float | None = None
    interrupt: float | None = None
    finalize: float | None = None
    health_check: float | None = None
    termination_barrier: float | None = None
    assignment: float | None = None
    start_barrier: float | None = None
    initialize: float | None = None
    total: float | None = None
    total_from_seen: bool = False


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The end of one iteration, and the recovery that followed.

    Attributes:
        call: number of the call of a wrapped function, from 0.
        iteration: the iteration that ended.
        cause: the first cause; `None` if no fault was recorded, as when a process joined.
        others: the other faults of the same iteration, in order.
        reason: why the survivors left the iteration, as they recorded it.
        resumed: whether any member entered the function in the next iteration.
        swallowed: places in user code that caught the interrupt and continued.
        redone_steps: how many completed steps the following restore discarded; `None` if unknown.
    """

    call: int
    iteration: int
    at: float
    cause: Cause | None
    others: tuple[Cause, ...] = ()
    reason: str = ""
    phases: Phases = field(default_factory=Phases)
    lost: tuple[Party, ...] = ()
    joined: tuple[Party, ...] = ()
    world_size_before: int = 0
    world_size_after: int = 0
    resumed: bool = True
    swallowed: tuple[str, ...] = ()
    redone_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """The wall time of a host that advanced nothing, in seconds, by its first reason.

    Attributes:
        restart: not every active rank of the host was in the function, or the host knew of a fault.
        replacements: the part of `restart` in which the restart waited for replacements.
        hang: from the last progress of the hung ranks to the timeout that ended the iteration.
        setup: from the entry into the function to the end of the restore.
        saves: `save` blocked training.
        redone: the resulting state was discarded, since a later restore went back further.
        reduced: the share of the ranks that the job lacked, of the rest.
    """

    restart: float
    replacements: float
    hang: float
    setup: float
    saves: float
    redone: float
    reduced: float


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Wall time and productive time of one host.

    Attributes:
        wall_seconds: from the first entry into the function to the end, summed over the calls.
        productive_seconds: the wall time without the lost time.
        goodput: productive time divided by wall time; `None` without wall time.
    """

    host: str
    wall_seconds: float
    productive_seconds: float
    goodput: float | None
    lost: LostTime


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run, as rank 0 saw them; a save ends the same way on all ranks.

    Attributes:
        committed: number of committed saves.
        size_bytes, newest: the size and the step of the last one.
        blocked_median, blocked_worst: seconds for which `save` blocked training.
        durable_median: seconds until the commit.
        failed: step and cause of each that was not committed.
        restored: step and source of each restore: storage, memory, or memory and the copies of
            named ranks.
        passed_over: step and cause of each that a restore found damaged and skipped.
        copied: number of saves that were copied to other hosts' memory.
        copied_bytes, copied_median: what rank 0 sent for the last one; seconds until it was there.
        not_copied: step and cause of each that was not; step -1 if none could be.
    """

    committed: int
    size_bytes: int
    newest: int
    blocked_median: float
    blocked_worst: float
    durable_median: float
    failed: tuple[tuple[int, str], ...]
    restored: tuple[tuple[int, str], ...]
    passed_over: tuple[tuple[int, str], ...]
    copied: int = 0
    copied_bytes: int = 0
    copied_median: float = 0.0
    not_copied: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A request to end the whole job, which it obeyed.

    Attributes:
        reason: who asked for it, and how.
        host: where it was recorded first.
        exits: how each process ended, by launcher rank, if the launcher recorded it.
    """

    reason: str
    host: str
    at: float
    exits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostLoss:
    """A host that the job has lost, as the launcher of host `seen_by` recorded it first."""

    name: str
    address: str
    reason: str
    left: bool
    seen_by: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a run.

    Attributes:
        source: `wrapper`: the events of the wrapped function's ranks; `launcher`: the script does
            not use `Wrapper`, so only the starts and exits of its processes are known, a restart is
            one of all processes, and `rank` is the launcher's; `checkpoints`: not even those are
            known.
        restarts: every iteration that ended in a restart, or should have.
        replaced: number of members that joined in place of lost ones.
        recovery_seconds: sum of the totals of the restarts.
        goodput: of the host with the longest wall time.
        redone_steps: over all restarts; `None` if it is not known for each of them.
        steps_from: what `redone_steps` is based on: `steps` (recorded by `Job`), `pings` (one for
            each step, so it is approximate), or empty.
        redone_known: whether lost time includes redone work: a restart restored a checkpoint.
        stop: the request that ended the job, if one did.
        waiting: members that asked to join and were in no iteration.
        completed: number of members that completed the last call.
        notes: number of notes of each name.
        torn_logs: files whose last line was left incomplete by a dying process.
        saves: the checkpoints; `None` if there are no checkpoint events.
        hosts_lost: in the order in which they were recorded.
    """

    source: str
    events: int
    calls: int
    hosts: tuple[HostTime, ...]
    world_size: int
    restarts: tuple[Restart, ...]
    lost: int
    joined: int
    replaced: int
    recovery_seconds: float
    goodput: float | None
    redone_steps: int | None
    steps_from: str
    redone_known: bool
    stop: Stop | None
    waiting: tuple[Party, ...]
    completed: int
    monitors_restarted: int
    notes: dict[str, int]
    torn_logs: tuple[str, ...]
    saves: Saves | None = None
    hosts_lost: tuple[HostLoss, ...] = ()
