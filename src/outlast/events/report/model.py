"""What a report says, as plain dataclasses: the restarts, what each took, and the totals.

Every time `at` is in seconds from the first event of the host on which it happened, since the
monotonic clocks of two hosts have nothing in common. A duration that no event tells is `None`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Cause", "HostTime", "Party", "Phases", "Report", "Restart", "Saves"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One fault: who had it, what it was, and when.

    Attributes:
        rank: place of the member in the iteration that it ended.
        interruption: a name of `outlast.inprocess.attribution.Interruption`.
        message: what the fault said of itself.
        exit: how the launcher saw the process end ("killed by SIGKILL"), where it did.
        consequence: it looks like the echo of another fault (a peer's closed connection).
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


@dataclass(frozen=True, kw_only=True)
class Party:
    """A member that was lost (`rank` is its last one) or that joined (`rank` is its first)."""

    rank: int
    member: int
    host: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """What the parts of one restart took, in seconds.

    Each is that of the survivor which took longest, but for the barriers: there it is that of
    the last to arrive, since the others wait for it rather than for the barrier.

    Attributes:
        detection: from the fault until the last survivor on the same host has seen it.
        interrupt: from the end of the abort until the function is left.
        health_check: after the fault, and before the function is entered again.
        total: from the fault until the last survivor of the same host is in the function again.
        total_from_seen: no survivor shares a host with the fault, so `total` begins where the
            fault was first seen.
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
    """The end of one iteration, and what came of it.

    Attributes:
        call: which call of a wrapper this was, from 0.
        iteration: the iteration that ended.
        cause: the first cause; `None` where no fault was recorded, as when a joiner came.
        others: the other faults of the same iteration, in order.
        reason: why survivors left the iteration, in their own words, where no fault says it.
        resumed: some member entered the function in the next iteration.
        swallowed: places in user code that caught the interrupt and went on.
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


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """How the time of one host was spent.

    Attributes:
        wall_seconds: from the first entry into the function to the end, calls added up.
        productive_seconds: the part in which every active rank of the host was in the function
            and the host knew of no fault.
        goodput: the productive part of the wall time; `None` where there was none.
    """

    host: str
    wall_seconds: float
    productive_seconds: float
    goodput: float | None


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run, as rank 0 saw them; a save has the same end on all ranks.

    Attributes:
        committed: how many saves.
        size_bytes: of the last one.
        blocked_median, blocked_worst: seconds that `save` held the training up.
        durable_median: seconds until the commit.
        failed: step and cause of each that was not committed.
        restored: step and source (memory, storage) of each restore.
        passed_over: step and cause of each that was found damaged.
    """

    committed: int
    size_bytes: int
    blocked_median: float
    blocked_worst: float
    durable_median: float
    failed: tuple[tuple[int, str], ...]
    restored: tuple[tuple[int, str], ...]
    passed_over: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The story of a run.

    Attributes:
        restarts: every iteration that ended in a restart, or that should have.
        replaced: members that joined in the place of lost ones.
        recovery_seconds: the totals of the restarts, added up.
        goodput: over all hosts.
        waiting: members that asked to join and were in no iteration.
        completed: members that saw every rank complete, in the last call.
        notes: how often other rooms noted what.
        torn_logs: files whose last line a dying process did not finish.
        saves: the checkpoints; `None` if there is no word of any.
    """

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
    waiting: tuple[Party, ...]
    completed: int
    monitors_restarted: int
    notes: dict[str, int]
    torn_logs: tuple[str, ...]
    saves: Saves | None = None
