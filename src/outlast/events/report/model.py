"""The report as plain dataclasses: the restarts, what each took, the checkpoints, the totals.

Every time `at` is in seconds from the first event of the host on which it happened, since the
monotonic clocks of two hosts have nothing in common. An unknown duration is `None`.
"""

from __future__ import annotations

from dataclasses import field

from outlast.events.event import Record

SCHEMA = 2
"""The version of the JSON report: raised when a field is removed or changes its meaning."""


class Cause(Record):
    """One fault: on which rank, of which kind, and when; see `outlast.events.types.Fault`.

    Attributes:
        rank: the member's rank in the iteration that the fault ended.
        pid: the process; -1 if it is not known.
        launcher_rank: the rank in the launcher's messages, which never changes; -1 if unknown.
        exit: how the process ended ("killed by SIGKILL"), if the launcher recorded it.
    """

    rank: int
    member: int
    host: str
    interruption: str
    message: str
    traceback: str = ""
    exit: str = ""
    consequence: bool = False
    overtaken: bool = False
    at: float = 0.0
    pid: int = -1
    launcher_rank: int = -1
    idle: float = 0.0
    where: str = ""

    @property
    def may_be_harmless(self) -> bool:
        """Whether the rank may not have failed by itself."""
        return self.consequence or self.overtaken


class Party(Record):
    """A member that was lost (`rank` is its last one) or that joined (`rank` is its first)."""

    rank: int
    member: int
    host: str
    reason: str = ""


class Phases(Record):
    """Durations of the phases of one restart, in seconds: of the slowest survivor, except that the
    barriers are those of the last to arrive, for which the others wait.

    Attributes:
        detection: from the fault until the last survivor on the same host has seen it.
        interrupt: from the end of the abort until the function is left.
        total: from the fault until the last survivor on the same host is in the function again;
            `total_from_seen`: from where it was first seen, for no survivor shares its host.
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


PHASE_FIELDS = {
    "detect": "detection",
    "abort": "abort",
    "leave": "interrupt",
    "finalize": "finalize",
    "health": "health_check",
    "term": "termination_barrier",
    "assign": "assignment",
    "start": "start_barrier",
    "init": "initialize",
    "total": "total",
}
"""The fields of `Phases` by their names in tables, traces and metrics, in order."""


class HostLoss(Record):
    """A host that the job has lost, as the launcher of host `seen_by` recorded it first."""

    name: str
    address: str
    reason: str
    left: bool
    seen_by: str
    at: float


class RestartParts(Record):
    """The time between two stays in the function, in seconds. The parts follow each other: each
    ends when the last rank of the host has finished it. `clean_up` is finalize and health check;
    `entry` is rank assignment, barriers and initialize, or without `Wrapper` the start of the
    processes. Waits for `replacements` are in no other part.
    """

    detection: float
    abort: float
    leave: float
    clean_up: float
    replacements: float
    entry: float


class Recovery(RestartParts):
    """What one host spent a restart on, from the last progress before it (`hang`) to the end of the
    restore; `total` is the sum. Unlike in `Phases`, no time is in it twice. `setup` is what the
    function does before the last rank begins its `restore`.
    """

    host: str
    hang: float
    setup: float
    restore: float
    total: float


class Span(Record):
    """A state of a rank, or a phase of its recovery.

    `state` in a lane: starting, restoring, training, hung, reserve (a spare rank, waiting),
    restarting, lost; of checkpoints: saving. Without `Wrapper`, training means that the process was
    running. Of a recovery: a name of `PHASE_FIELDS` or of a barrier.
    """

    state: str
    start: float
    end: float


class RankRecovery(Record):
    """One rank, from when it learned that the iteration must end to its next entry. `rank` is that
    of the iteration that ended, `lane` that of its lane in the timeline; `seen` is when its process
    recorded that the iteration must end.
    """

    host: str
    pid: int
    rank: int
    lane: int
    start: float
    end: float | None
    seen: float | None
    phases: tuple[Span, ...]


class Restart(Record):
    """The end of one iteration, and the recovery that followed.

    Attributes:
        call: number of the call of a wrapped function, from 0.
        iteration: the iteration that ended.
        cause: the first fault of a rank; `None` if none was recorded, as when a process joined.
        others: the other faults of the same iteration, in order.
        reason: why the survivors left the iteration, as they recorded it.
        moved: why ranks have left in order, or which have joined so: a move, and no fault.
        moved_bytes: how much of their state their successors have received.
        resumed: whether any member entered the function in the next iteration, or a later one.
        swallowed: places in user code that caught the interrupt and continued.
        redone_steps: how many completed steps the following restore discarded; `None` if unknown.
        host_loss: the loss of a host if that is the first cause. The faults of ranks, `cause`
            too, are then its consequences.
        recovery: what the host of the fault (or else the slowest host) spent the restart on;
            `None` if the function was not entered again.
        ranks: the recovery of each survivor; it is in traces, not in the JSON report.
    """

    call: int
    iteration: int
    at: float
    cause: Cause | None
    others: tuple[Cause, ...] = ()
    reason: str = ""
    moved: str = ""
    moved_bytes: int = 0
    phases: Phases = field(default_factory=Phases)
    lost: tuple[Party, ...] = ()
    joined: tuple[Party, ...] = ()
    world_size_before: int = 0
    world_size_after: int = 0
    resumed: bool = True
    swallowed: tuple[str, ...] = ()
    redone_steps: int | None = None
    host_loss: HostLoss | None = None
    recovery: Recovery | None = None
    ranks: tuple[RankRecovery, ...] = field(default=(), repr=False)


class TimeOutside(RestartParts):
    """`RestartParts` of all restarts, and `uneven`: ranks entered the function at different times
    at the start, or left it at different times at the end.
    """

    uneven: float


class LostTime(Record):
    """The lost wall time of a host, in seconds, by its first reason (see `goodput.py`).
    `replacements` and `restart_parts` are parts of `restart`; all others add up.
    """

    restart: float
    replacements: float
    hang: float
    setup: float
    saves: float
    redone: float
    reduced: float
    restart_parts: TimeOutside


class HostTime(Record):
    """Wall time (from the first entry into the function to the end, summed over the calls) and
    productive time of one host. `start_seconds` is before it, from the start of the first process;
    `None` if the launcher did not record it.
    """

    host: str
    wall_seconds: float
    productive_seconds: float
    goodput: float | None
    lost: LostTime
    start_seconds: float | None = None


class Distribution(Record):
    """Durations in seconds; percentiles by nearest rank: measured ones. `p99` needs 20 values."""

    count: int
    p50: float
    p99: float | None
    worst: float
