"""The figures and sentences about a whole run: goodput, causes, checkpoints, its end."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from events.pages import Page
from events.synthetic_run import (
    ABORT,
    FINALIZE,
    HEALTH,
    INTERRUPT,
    RESTART,
    SEEN,
    SyntheticRun,
)
from events.test_goodput import own, run_with_redone_steps
from outlast.events.event import Event
from outlast.events.report import build, render_html, render_report, to_json
from outlast.events.report.builder import distribution
from outlast.events.report.sentences import describe, describe_goodput, headline_host, parts_of
from outlast.events.types import (
    BarrierPassed,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRestored,
    CopyCompleted,
    CopySkipped,
    Fault,
    LauncherEnded,
    Lost,
    PlannedFault,
    StepsDone,
    WorkerExited,
    WorkerStarted,
)


def test_the_parts_of_a_restart_follow_each_other() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(2, at=8.0)
    for member in (0, 1, 3):
        wait = BarrierPassed(name="replacements", seconds=0.125)
        run.write(member, wait, 8.0 + 0.375)  # in the part that ends with the entry
    run.restart(at=8.0)
    for member, seconds in ((0, 0.5), (3, 0.25)):  # the last rank begins it at 10.25
        own(run, member, CheckpointRestored(step=5, source="live", seconds=seconds), 10.5)
    run.complete(at=20.0)
    report = build(run.events)
    (restart,) = report.restarts
    recovery = restart.recovery
    assert recovery is not None
    cleaned = SEEN + ABORT + INTERRUPT + FINALIZE + HEALTH
    assert recovery.detection == SEEN
    assert recovery.abort == ABORT
    assert recovery.leave == INTERRUPT
    assert recovery.clean_up == FINALIZE + HEALTH
    assert recovery.replacements == 0.125
    assert recovery.entry == RESTART - cleaned - 0.125
    assert (recovery.setup, recovery.restore) == (1.75, 0.25)
    assert (recovery.hang, recovery.total) == (0.0, RESTART + 2.0)
    (host,) = report.hosts
    parts = host.lost.restart_parts
    assert (parts.detection, parts.abort, parts.entry) == (SEEN, ABORT, recovery.entry)
    assert parts.uneven == 0.0


def test_the_rank_whose_steps_take_the_most_cpu_time_is_named() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    for rank in run.view:
        for number, last in enumerate((10, 20)):  # the second record includes the first
            done = StepsDone(first=0, last=last, cpu_seconds=last * (0.06 if rank == 2 else 0.02))
            own(run, rank, done, 2.0 + number)
        own(run, rank, StepsDone(first=20, last=30, cpu_seconds=0.1), 5.0)  # after a restore
    run.complete(at=20.0)
    report = build(run.events)
    assert [(each.rank, each.steps) for each in report.step_cpu][:1] == [(2, 30)]
    assert "without waiting: 43.3 ms on rank 2 (" in " ".join(describe("ending", report))


def test_the_wait_for_a_rank_that_must_be_terminated_is_not_clean_up() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    hung = Fault(interruption="SOFT_TIMEOUT", cause="no progress for 2 s", idle=2.0)
    run.write(1, hung, 8.0, monitor=True)
    run.restart(at=8.0, lost=[1], joiners=["a"])
    later = [
        e for e in run.events if e.iteration == 1 or (isinstance(e, BarrierPassed) and e.time > 8.0)
    ]
    run.events = [e for e in run.events if e not in later]
    run.events += [dataclasses.replace(event, time=event.time + 16.0) for event in later]
    run.iteration = 0
    terminated = 8.0 + 16.0
    run.write(1, Lost(reason="terminated by its monitor process"), terminated, monitor=True)
    (restart,) = build(run.events).restarts
    assert restart.recovery is not None
    cleaned = SEEN + ABORT + INTERRUPT + FINALIZE + HEALTH  # until the barrier, 16 s later
    assert restart.recovery.leave == 16.0 - SEEN - ABORT
    assert restart.recovery.clean_up == cleaned


def test_the_time_without_progress_is_part_of_the_recovery() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(2, at=8.0, interruption="SOFT_TIMEOUT", cause="no progress", idle=3.0)
    run.restart(at=8.0)
    run.complete(at=20.0)
    (restart,) = build(run.events).restarts
    assert restart.recovery is not None
    assert restart.recovery.hang == 3.0


def test_percentiles_are_measured_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert vars(distribution(values)) == {"count": 100, "p50": 50.0, "p99": 99.0, "worst": 100.0}
    assert vars(distribution([2.0])) == {"count": 1, "p50": 2.0, "p99": None, "worst": 2.0}
    assert distribution(values[:19]).p99 is None
    assert distribution(values[:20]).p99 == 20.0


@pytest.mark.parametrize(
    ("restarts", "times"),
    [
        (1, ""),
        (19, "500.0 ms (median; 500.0 ms at worst), over 19 restarts"),
        (20, "500.0 ms (p50) or 500.0 ms (p99), over 20 restarts"),
    ],
)
def test_the_times_of_all_restarts_are_one_line(restarts: int, times: str) -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    for moment in range(1, restarts + 1):
        run.fault(1, at=float(moment * 10))
        run.restart(at=float(moment * 10))
    run.complete(at=1000.0)
    report = build(run.events)
    said = f"Back in the function after {times}." if times else ""
    assert "".join(describe("recovery", report)) == said
    page = Page(render_html(report, title="a run"))
    assert ("p99" in page.text) == (restarts == 20)


def test_the_goodput_of_a_short_run_is_explained() -> None:
    report = build(run_with_redone_steps().events)
    host = headline_host(report)
    assert host is not None
    assert sum(parts_of(host).values()) == pytest.approx(host.wall_seconds)
    assert describe_goodput(report) == (
        "Goodput is the share of the wall time in which training advanced: 16.75 s of 26.50 s. "
        "The rest: steps done again 25.47 %, set-up and restore 7.55 %, restarts 1.89 % and "
        "blocked by saves 1.89 %. The run was short: 9.75 s lost in a day would be a goodput of "
        "99.99 %."
    )


def test_causes_are_ranked() -> None:
    run = SyntheticRun(hosts=["a", "a", "b"], offsets={"b": 100.0})
    run.begin(at=0.0)
    for moment, member in ((10.0, 2), (20.0, 0), (30.0, 2)):
        run.fault(member, at=moment, cause="KeyError: 'x'" if member else "OSError: gone")
        run.restart(at=moment)
    run.complete(at=40.0)
    report = build(run.events)
    assert [(c.what, c.count, c.where) for c in report.causes] == [
        ("KeyError", 2, (("rank 2 on b", 2),)),
        ("OSError", 1, (("rank 0 on a", 1),)),
    ]
    assert [(c.host, c.count, c.causes) for c in report.host_counts] == [
        ("b", 2, (("KeyError", 2),)),
        ("a", 1, (("OSError", 1),)),
    ]


def test_exit_code_93_is_explained() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=1.0)
    for rank in (0, 1):
        exited = WorkerExited(host="a", pid=1, rank=rank, worker_pid=1000 + rank, exit_code=93)
        run.events.append(exited)
    report = build(run.events)
    assert "Ranks 0 and 1 ended with exit code 93: " in " ".join(describe("ending", report))


def test_a_log_that_does_not_end_says_so() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    started = [WorkerStarted(host="a", pid=1, rank=rank, worker_pid=1000 + rank) for rank in (0, 1)]
    run.begin(at=0.0)
    text = " ".join(describe("ending", build([*started, *run.events])))
    assert "The log has no end of the job: it still runs, or its launcher was killed." in text
    assert "completed" not in text

    ended = LauncherEnded(host="a", pid=1, time=9.0, exit_code=1)
    text = " ".join(describe("ending", build([*started, *run.events, ended])))
    assert "no end of the job" not in text
    assert "No rank is known to have completed the function." in text


def test_a_planned_fault_that_any_launcher_saw_has_fired() -> None:
    def planned(host: str, key: str, fired: bool) -> PlannedFault:
        return PlannedFault(
            host=host, pid=1, time=5.0, key=key, name="hang", rank=1, due="step 9", fired=fired
        )

    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    for host in ("a", "b"):
        run.events += [planned(host, "planned-0", host == "b"), planned(host, "planned-1", False)]
    report = build(run.events)
    assert [(fault.key, fault.fired) for fault in report.injected] == [
        ("planned-0", True),
        ("planned-1", False),
    ]
    assert describe("injected", report)[1] == "Never due, so not fired: hang on rank 1 (step 9)."


def ended_by_its_second_fault() -> SyntheticRun:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=10.0)
    run.restart(at=10.0)
    run.fault(1, at=20.0)
    for member in (0, 1):
        reason = "UnrecoverableFault: rank 1 on a: ValueError (the job ended after a mistake)"
        run.write(member, Lost(reason=reason), 21.0)
    return run


def test_the_fault_that_ends_the_job_is_listed_and_is_no_restart() -> None:
    report = build(ended_by_its_second_fault().events)
    assert [restart.resumed for restart in report.restarts] == [True, False]
    assert json.loads(to_json(report))["restart_count"] == 1
    assert "Ended after 1 restart:" in describe("end", report)[0]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    render_report(report, console)
    assert isinstance(console.file, io.StringIO)
    assert "2 ranks · 1 host · 1 restart · " in console.file.getvalue()
    page = Page(render_html(report, title="a run")).text
    assert "1 restart\n" in page
    assert "2 restarts" not in page
    assert "2 x ValueError" in page, "its faults are all listed"


def test_a_job_that_its_first_fault_ended_had_no_restart() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=10.0)
    page = Page(render_html(build(run.events), title="a run")).text
    assert "0 restarts" in page
    assert "There was no restart." in page


def test_the_reason_that_ranks_share_is_named_once() -> None:
    report = build(ended_by_its_second_fault().events)
    text = " ".join(describe("restart", report.restarts[1], report))
    reason = "UnrecoverableFault: rank 1 on a: ValueError (the job ended after a mistake)"
    assert f"Lost: rank 0 on a and rank 1 on a ({reason})." in text


def committed(step: int, *, rank: int, blocked: float, seconds: float, at: float) -> Event:
    return CheckpointCommitted(
        rank=rank,
        host="a",
        time=at,
        step=step,
        size_bytes=step * 1_000_000,
        blocked_seconds=blocked,
        seconds=seconds,
    )


def test_a_run_without_checkpoints_has_no_saves() -> None:
    assert build([]).saves is None


def test_a_log_of_checkpoints_alone_says_so() -> None:
    events = [committed(10, rank=0, blocked=0.1, seconds=0.2, at=1.0)]
    report = build(events)
    assert (report.source, report.goodput, report.restarts) == ("checkpoints", None, ())
    console = Console(file=io.StringIO(), width=80, color_system=None)
    render_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert text.startswith("The logs have only events of checkpoints.")
    assert "rank" not in text.partition("1 checkpoint of 10.0 MB")[0]


def test_each_save_counts_once_for_all_ranks() -> None:
    events = [
        committed(step, rank=rank, blocked=blocked, seconds=seconds, at=float(step))
        for step, blocked, seconds in ((10, 0.002, 0.5), (20, 0.004, 0.7), (30, 0.04, 0.6))
        for rank in (0, 1)
    ]
    saves = build(events).saves
    assert saves is not None
    assert saves.committed == 3
    assert saves.size_bytes == 30_000_000
    assert (saves.blocked_median, saves.blocked_worst) == (0.004, 0.04)
    assert saves.durable_median == 0.6
    said, newest = describe("saves", saves)
    assert newest == "The newest checkpoint is that of step 30."
    assert "3 checkpoints of 30.0 MB" in said
    assert "4.0 ms" in said
    assert "600.0 ms" in said


def test_failed_damaged_and_restored_checkpoints_are_named_by_step() -> None:
    events: list[Event] = [
        CheckpointFailed(rank=0, host="a", time=1.0, step=7, cause="the disk is full"),
        CheckpointPassedOver(rank=0, host="a", time=2.0, step=6, source="storage", cause="damaged"),
        CheckpointRestored(rank=0, host="a", time=3.0, step=5, source="memory"),
    ]
    saves = build(events).saves
    assert saves is not None
    assert saves.failed == ((7, "the disk is full"),)
    text = " ".join(describe("saves", saves))
    for part in ("Failed on all ranks, not committed: step 7", "step 6", "step 5 from memory"):
        assert part in text


def test_copies_are_named_with_their_ranks_and_hosts() -> None:
    def restored(rank: int, held_by: str = "") -> Event:
        return CheckpointRestored(
            rank=rank, host="a", time=3.0, step=5, source="copies", held_by=held_by
        )

    events: list[Event] = [
        CopyCompleted(rank=0, host="a", time=1.0, step=5, own_bytes=10_000_000, seconds=0.5),
        CopySkipped(rank=0, host="a", time=2.0, step=6, cause="rank 3 on b: too slow"),
        restored(0),
        restored(1),
        restored(2, "c"),
        restored(3, "c"),
    ]
    saves = build(events).saves
    assert saves is not None
    text = " ".join(describe("saves", saves))
    assert "step 5 from memory (ranks 2, 3 from their copies on host c)" in text
    assert "1 save copied to other hosts' memory: 10.0 MB from rank 0 in 500.0 ms" in text
    assert "step 6, rank 3 on b: too slow" in text


def test_one_save_has_no_median() -> None:
    saves = build([committed(10, rank=0, blocked=0.1, seconds=0.2, at=1.0)]).saves
    assert saves is not None
    assert describe("saves", saves)[0] == (
        "1 checkpoint of 10.0 MB committed: it blocked training for 100.0 ms and was durable after "
        "200.0 ms."
    )
