"""The whole report."""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.events.report.model.checkpoints import Saves
from outlast.events.report.model.restarts import HostLoss, Party, Restart
from outlast.events.report.model.silent_faults import Mismatch, Straggler
from outlast.events.report.model.timeline import HostTimeline
from outlast.events.report.model.times import HostTime


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
class Distribution:
    """Durations in seconds; percentiles by nearest rank, so each is one that was measured."""

    count: int
    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class CauseCount:
    """Restarts with the same kind of first cause.

    Attributes:
        what: the type of an exception, a signal, or a few words.
        where: ranks and hosts of the faults, the most frequent first, with their numbers.
        recovery_seconds: sum of the totals of the restarts.
        redone_steps: over all of them; `None` if not known for each.
    """

    what: str
    count: int
    where: tuple[tuple[str, int], ...]
    recovery_seconds: float
    redone_steps: int | None


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """First causes on one host, with their kinds and numbers."""

    host: str
    count: int
    causes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault of the plan of `outlast run --chaos`; if it has not `fired`, `at` is meaningless."""

    key: str
    kind: str
    rank: int
    due: str
    fired: bool
    host: str
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
        no_end: a launcher has recorded starts of processes, and no launcher the end of the job: the
            job still runs, or its launchers were killed.
        notes: number of notes of each name.
        torn_logs: files whose last line was left incomplete by a dying process.
        saves: the checkpoints; `None` if there are no checkpoint events.
        hosts_lost: in the order in which they were recorded.
        recovery: percentiles over the restarts of each part of `Recovery`, and of `Phases.total`
            as `back`; parts that no restart had are left out.
        restart_causes: the restarts by cause, in words: "2 restarts: 2 x died (rank 3)"; empty if
            there were none.
        causes: kinds of first causes, the most frequent first.
        host_counts: hosts with first causes, the most frequent first.
        injected: the faults of the plan, if the job had one and its launcher recorded its end.
        no_restart: launcher ranks whose process ended with exit code 93.
        timeline: what each rank did when, by host.
        mismatches, stragglers: faults that raised no error.
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
    recovery: dict[str, Distribution] = field(default_factory=dict)
    restart_causes: str = ""
    causes: tuple[CauseCount, ...] = ()
    host_counts: tuple[HostCount, ...] = ()
    injected: tuple[InjectedFault, ...] = ()
    no_restart: tuple[int, ...] = ()
    no_end: bool = False
    timeline: tuple[HostTimeline, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
