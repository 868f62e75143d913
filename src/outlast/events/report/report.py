"""The report of a whole run: its restarts, checkpoints, timeline and totals."""

from __future__ import annotations

from dataclasses import field

from outlast.events.event import Record
from outlast.events.report.model import (
    SCHEMA,
    Distribution,
    HostLoss,
    HostTime,
    Party,
    Restart,
    Span,
)


class Stop(Record):
    """A request to end the job: who asked, and how each process ended, by launcher rank."""

    reason: str
    host: str
    at: float
    exits: tuple[str, ...] = ()


class CauseCount(Record):
    """Restarts and ends of the job with the same first cause (`what`), the ranks and hosts on which
    it was with their numbers, and the positions in `Report.restarts`, from 0.
    """

    what: str
    count: int
    where: tuple[tuple[str, int], ...]
    recovery_seconds: float
    redone_steps: int | None
    restarts: tuple[int, ...]


class HostCount(Record):
    """First causes on one host, with their kinds and numbers."""

    host: str
    count: int
    causes: tuple[tuple[str, int], ...]


class InjectedFault(Record):
    """A fault of the plan of `outlast run --chaos`; if it has not `fired`, `at` is meaningless."""

    key: str
    kind: str
    rank: int
    due: str
    fired: bool
    host: str
    at: float


class Mismatch(Record):
    """Replicas that differed: one for each set of ranks, with the number of checks that found it;
    the other attributes are of the first: see `outlast.events.types.ReplicaMismatch`.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    majority: bool
    replicas: int
    step: int
    clean_step: int
    parameters: tuple[str, ...]
    checks: int
    host: str
    at: float


class Straggler(Record):
    """A rank on `straggler_host` that was slower than the others; times are medians of a step."""

    rank: int
    straggler_host: str
    step: int
    seconds: float
    typical_seconds: float
    host: str
    at: float


class StepCpu(Record):
    """The CPU time of a rank's training thread for its `steps`: no waits, no work of a device."""

    rank: int
    host: str
    steps: int
    seconds: float


class Skip(Record):
    """Batches that were left out: see `outlast.events.types.BatchesSkipped`."""

    step: int
    found: int
    samples: int
    host: str
    at: float


class Save(Record):
    """One save, called `at`; `seconds` until its commit, or its failure, which has a `cause`."""

    step: int
    host: str
    at: float
    blocked_seconds: float
    seconds: float
    size_bytes: int = 0
    cause: str = ""


class Restore(Record):
    """One restore; `source` as in `Saves.restored`, `at` when it had ended."""

    step: int
    host: str
    at: float
    source: str
    seconds: float


class Saves(Record):
    """The checkpoints of a run, as rank 0 saw them; a save ends the same way on all ranks.

    Attributes:
        size_bytes, newest: the size and the step of the last committed save.
        blocked_median, blocked_worst: seconds for which `save` blocked training.
        durable_median: seconds until the commit.
        failed, passed_over: step and cause of each that was not committed, and that a restore found
            damaged and skipped.
        restored: step and source of each restore: storage, memory, memory and the copies of named
            ranks, or the ranks' own state.
        copied_bytes, copied_median: what rank 0 sent to another host's memory for the last save
            that was copied; seconds until it was there.
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
    copied: int
    copied_bytes: int
    copied_median: float
    not_copied: tuple[tuple[int, str], ...]
    removed: int
    each: tuple[Save, ...]
    restores: tuple[Restore, ...]


class Mark(Record):
    """A moment. `kind`: fault, consequence, injected, takeover, restored, not_saved, passed_over,
    host_lost, host_joined, stop, monitor_restarted, mismatch, straggler.
    """

    kind: str
    at: float
    text: str


class Lane(Record):
    """One rank, the launcher or the checkpoints of a host. `rank` is the launcher's number, or else
    the first rank of the process: a replacement continues the lane. -1 for other lanes.
    """

    name: str
    rank: int
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...] = ()


class HostTimeline(Record):
    """The lanes of one host. `shift` is what to add to its times so that its entries into the
    function coincide with those of the host with the longest wall time; `None` if unknown.
    """

    host: str
    end: float
    shift: float | None
    lanes: tuple[Lane, ...]


class Report(Record):
    """The report of a run.

    Attributes:
        schema: the version of these fields.
        run_id, command: of the launcher; the script and its arguments as one would type them.
        source: `wrapper`: the events of the wrapped function's ranks; `launcher`: the script does
            not use `Wrapper`, so only the starts and exits of its processes are known, a restart is
            one of all processes, and `rank` is the launcher's; `checkpoints`: not even those are
            known.
        restarts: every iteration that ended in a restart, or should have.
        restart_count: those of them that the job `resumed` from: not a fault that ended it.
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
        dropped_bytes: of events, in the middle of logs that are bounded in size.
        last_lines: those of the launcher of a job that has failed.
        saves: the checkpoints; `None` if there are no checkpoint events.
        recovery: percentiles over the restarts of each part of `Recovery`, and of `Phases.total`
            as `back`; parts that no restart had are left out.
        restart_causes: the restarts by cause, in words: "2 restarts: 2 x KeyError at train.py:16
            (rank 3)"; empty if there were none.
        causes, host_counts: first causes, by kind and by host, the most frequent first.
        injected: the faults of the plan, if the job had one and its launcher recorded its end.
        no_restart: launcher ranks whose process ended with exit code 93.
        no_end: a launcher has recorded starts of processes, and no launcher the end of the job: the
            job still runs, or its launchers were killed.
        timeline: what each rank did when, by host.
        mismatches, stragglers: faults that raised no error.
        skips: the batches that were left out after values that were not finite.
        step_cpu: of each rank, the most first.
    """

    schema: int = SCHEMA
    run_id: str
    command: str
    source: str
    events: int
    calls: int
    hosts: tuple[HostTime, ...]
    world_size: int
    restarts: tuple[Restart, ...]
    restart_count: int
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
    dropped_bytes: int = 0
    last_lines: str = ""
    saves: Saves | None
    hosts_lost: tuple[HostLoss, ...]
    recovery: dict[str, Distribution] = field(default_factory=dict)
    restart_causes: str
    causes: tuple[CauseCount, ...]
    host_counts: tuple[HostCount, ...]
    injected: tuple[InjectedFault, ...]
    no_restart: tuple[int, ...]
    no_end: bool
    timeline: tuple[HostTimeline, ...]
    mismatches: tuple[Mismatch, ...]
    stragglers: tuple[Straggler, ...]
    skips: tuple[Skip, ...]
    step_cpu: tuple[StepCpu, ...] = ()
