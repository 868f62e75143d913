"""Faults in the report: lost hosts, stops, overtaken exceptions, silent faults."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from events.synthetic_run import RESTART, SyntheticRun
from events.test_goodput import own
from outlast.events.event import Event
from outlast.events.report import build, render_report
from outlast.events.report.sentences import cause_text, describe
from outlast.events.types import (
    BarrierPassed,
    BatchesSkipped,
    Fault,
    HostJoined,
    HostLost,
    Lost,
    NothingToRestore,
    ReplicaMismatch,
    Seen,
    StepsDone,
    StopRequested,
    StragglerFound,
    WorkerExited,
    WorkerStarted,
)

LOST = {"host_id": "c-1", "name": "c", "address": "10.0.0.3", "reason": "no heartbeat for 3.6 s"}


def test_a_lost_host_is_named_once() -> None:
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    for host, at in (("a", 10.0), ("b", 11.0)):  # each launcher writes what it has learned
        joined = HostJoined(host=host, pid=1, time=1.0, host_id="c-1", name="c", address="10.0.0.3")
        lost = HostLost(host=host, pid=1, time=at, **LOST)  # type: ignore[arg-type]
        run.events += [joined, lost]
    report = build(run.events)
    assert [(loss.name, loss.seen_by) for loss in report.hosts_lost] == [("c", "a")]
    text = io.StringIO()
    render_report(report, Console(file=text, width=200))
    sentence = (
        "Host c (10.0.0.3) was lost, 10.000 s into the run as a saw it: no heartbeat for 3.6 s."
    )
    assert text.getvalue().count(sentence) == 1


def test_the_exit_of_a_fresh_host_is_not_that_of_the_lost_one() -> None:
    # A fresh host with the same name, such as a replaced pod, counts its processes from 1 too.
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    run.restart(at=5.0, lost=[1], joiners=["b"])
    run.complete(at=9.0)
    exited = WorkerExited(host="b", pid=1, time=9.5, worker_pid=1001, exit_code=0)
    events = [dataclasses.replace(e, pid=1001) if e.member == 2 else e for e in run.events]
    report = build([*events, exited])
    (restart,) = report.restarts
    assert [(party.rank, party.reason) for party in restart.lost] == [(1, "")]
    text = io.StringIO()
    render_report(report, Console(file=text, width=200))
    assert "rank 1: lost" in text.getvalue()  # not "new ranks joined"
    assert "No fault" not in text.getvalue()


def run_without_a_host() -> SyntheticRun:
    """Host b with rank 1 loses power at 8 s: nothing is heard of it for 6 s."""
    run = SyntheticRun(hosts=["a", "b", "c"], offsets={"b": 500.0, "c": 9000.0})
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 1.0)
    own(run, 1, StepsDone(first=0, last=7), 7.5)  # the last sign of host b
    for member in (0, 2):
        own(run, member, StepsDone(first=0, last=8), 8.0)
        reset = "RuntimeError: Connection reset by peer"
        run.fault(member, at=12.0, cause=reset, consequence=True)
    for host, offset in (("a", 0.0), ("c", 9000.0)):
        lost = HostLost(
            host=host,
            pid=1,
            time=offset + 14.0,
            host_id="b-1",
            name="b",
            address="10.0.0.2",
            reason="no heartbeat for 6.0 s",
        )
        run.events.append(lost)
    for member in (0, 2):
        run.write(member, BarrierPassed(name="replacements", seconds=5.0), 19.0)
    run.restart(at=19.0, lost=[1], joiners=["b"])
    for member in run.view:
        own(run, member, NothingToRestore(), 20.0)
    run.complete(at=30.0)
    return run


def test_the_loss_of_a_host_is_the_first_cause_of_broken_connections() -> None:
    report = build(run_without_a_host().events)
    (restart,) = report.restarts
    assert restart.host_loss is not None
    assert restart.host_loss.name == "b"
    assert cause_text(restart) == "host b: lost"
    text = " ".join(describe("restart", restart, report))
    assert text.startswith("Host b (10.0.0.2) was lost, ")
    assert "Probably as a consequence, ranks 0 and 2 failed: RuntimeError: Connection" in text
    assert [(each.what, each.where) for each in report.causes] == [("host lost", (("b", 1),))]
    assert [(each.host, each.count) for each in report.host_counts] == [("b", 1)]


def test_the_lane_of_a_rank_ends_with_the_last_sign_of_its_host() -> None:
    (host,) = [each for each in build(run_without_a_host().events).timeline if each.host == "b"]
    lane = next(lane for lane in host.lanes if lane.name == "rank 1")
    assert [(span.state, span.start, span.end) for span in lane.spans] == [
        ("training", 0.0, 7.5),
        ("lost", 7.5, 30.0),
    ]


def test_the_wait_for_a_host_that_is_lost_is_not_time_of_redone_steps() -> None:
    hosts = {host.host: host for host in build(run_without_a_host().events).hosts}
    assert hosts["a"].lost.hang == 4.0, "from the last heartbeat of b, at 8 s, to the reset"
    assert hosts["a"].lost.redone == 8.0 - 1.0
    assert hosts["b"].lost.hang == 0.0
    assert hosts["b"].lost.redone == 7.5 - 0.0, "until its last sign, not until it joined again"
    assert hosts["b"].lost.restart == 19.5 - 7.5
    assert hosts["b"].lost.replacements == 19.0 - 7.5
    for host in hosts.values():
        assert host.wall_seconds == 30.0


def test_a_rank_that_failed_by_itself_stays_the_first_cause() -> None:
    run = run_without_a_host()
    run.iteration, run.view = 0, [0, 1, 2]
    run.fault(2, at=11.0)
    (restart,) = build(run.events).restarts
    assert restart.host_loss is None
    assert cause_text(restart) == "rank 2: ValueError"


def test_an_earlier_death_on_the_host_is_not_its_loss() -> None:
    run = SyntheticRun(hosts=["a", "b"], offsets={"b": 500.0})
    run.begin(at=0.0)
    run.death(1, at=3.0)
    run.restart(at=3.0, lost=[1], joiners=["b"])
    run.fault(0, at=8.0, cause="RuntimeError: Connection reset", consequence=True)
    lost = dict(LOST, host_id="b-1", name="b")
    run.events.append(HostLost(host="a", pid=1, time=9.0, **lost))  # type: ignore[arg-type]
    run.restart(at=8.0, lost=[2], joiners=["b"])
    run.complete(at=20.0)
    first, second = build(run.events).restarts
    assert first.host_loss is None
    assert second.host_loss is not None


def stopped_run(*, at: float = 10.0) -> SyntheticRun:
    """Two ranks are told to stop by the launcher, and leave."""
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    reason = "SIGTERM to the launcher"
    run.events.append(StopRequested(host="a", pid=1, time=at, reason=reason))
    for member in (0, 1):
        run.write(member, StopRequested(reason="rank 0 on a: signal SIGTERM"), at + 0.25)
        cause = "SystemExit: 143"
        run.fault(member, at=at + 1, interruption="BASE_EXCEPTION", cause=cause)
        run.write(member, Seen(reason="fault"), at + 1.25)
        exited = WorkerExited(worker_pid=1000 + member, rank=member, exit_code=143)
        run.write(member, exited, at + 1.5)
    return run


def test_a_stop_is_not_a_restart() -> None:
    report = build(stopped_run().events)
    assert report.restarts == ()
    assert report.lost == 0
    assert report.stop is not None
    assert (report.stop.reason, report.stop.at) == ("SIGTERM to the launcher", 10.0)
    told = (
        "The job was told to stop, 10.000 s into the run: SIGTERM to the launcher. The processes "
        "ended: rank 0 (exit code 143) and rank 1 (exit code 143)."
    )
    assert told in describe("ending", report)


def test_ranks_that_leave_without_a_fault_are_not_lost() -> None:
    run = stopped_run()
    run.events = [event for event in run.events if not isinstance(event, Fault)]
    for member in (0, 1):
        run.write(member, Lost(reason="SystemExit(143)"), 11.5)
    report = build(run.events)
    assert report.restarts == ()
    assert report.stop is not None


def test_a_fault_before_the_stop_is_a_restart() -> None:
    run = stopped_run()
    run.fault(1, at=9.0)
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.message == "ValueError: a bad batch"


def test_a_rank_that_leaves_by_itself_is_lost() -> None:
    run = stopped_run()
    run.events = [event for event in run.events if not isinstance(event, StopRequested)]
    report = build(run.events)
    assert report.stop is None
    (restart,) = report.restarts
    assert not restart.resumed


def test_the_launchers_number_of_a_rank_is_given_where_it_differs() -> None:
    run = SyntheticRun(hosts=["a"] * 3)
    for member in range(3):
        event = WorkerStarted(worker_pid=1000 + member, rank=member, host="a", pid=1, time=-1.0)
        run.events.append(event)
    run.begin(at=0.0)
    run.death(0, at=5.0)
    run.restart(at=5.0, lost=[0])
    run.fault(2, at=10.0)  # now rank 1
    run.restart(at=10.0)
    report = build(run.events)
    first, second = (describe("restart", restart, report)[0] for restart in report.restarts)
    assert first.startswith("Rank 0 (pid 1000, host a) died")
    assert second.startswith("Rank 1 (pid 1002, host a, rank 2 of the launcher) raised")


def test_a_join_has_no_fault_to_count_from() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(0, at=5.0, cause="connection closed by peer", consequence=True)
    run.restart(at=5.0, joiners=["a"])
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.phases.detection is None, "there is no fault to detect"
    assert restart.phases.total_from_seen
    text = " ".join(describe("restart", restart, report))
    assert "No fault: the iteration ended so that new ranks could join." in text
    assert "after the end of the iteration." in text
    assert "after the fault" not in text


CLOSED = "RuntimeError: Connection closed by peer"
LATE_S = 0.25


def faulty(*, hung: bool = False, real: bool = False, joiners: tuple[str, ...] = ()) -> str:
    """The text about a restart in which rank 2 is interrupted with a `KeyError`."""
    run = SyntheticRun()
    run.begin(at=1.0)
    run.fault(0, at=11.0, cause=CLOSED, consequence=True)
    if hung:
        run.fault(2, at=11.0, interruption="SOFT_TIMEOUT", cause="no progress for 9 s", idle=9.0)
    if real:
        run.fault(3, at=11.0)
    run.fault(2, at=11.0 + LATE_S, cause="KeyError: 'mine'", overtaken=True)
    run.restart(at=11.0, joiners=joiners)
    run.complete(at=21.5)
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.at == 10.0
    assert joiners or restart.phases.total == RESTART  # from the first sign of a fault
    return " ".join(describe("restart", restart, report))


def test_it_is_the_first_cause_beside_consequences() -> None:
    text = faulty()
    assert text.startswith("Rank 2 (pid 1002, host a) raised an exception: KeyError: 'mine'. The")
    assert "interrupted this exception in the function, which may have handled it" in text
    assert f"Probably as a consequence, rank 0 failed: {CLOSED}." in text


def test_it_is_not_beside_an_exception_that_left_the_function() -> None:
    text = faulty(real=True)
    assert text.startswith("Rank 3 (pid 1003, host a) raised an exception: ValueError: a bad batch")
    assert "Rank 2 (pid 1002, host a) was interrupted with an exception: KeyError: 'mine'." in text


def test_the_hang_of_the_same_rank_comes_first_and_hides_nothing() -> None:
    text = faulty(hung=True)
    assert text.startswith("Rank 2 (pid 1002, host a) ")
    assert text.index("no progress for 9 s") < text.index("an exception: KeyError: 'mine'")


def test_a_job_that_grows_has_no_fault() -> None:
    assert faulty(joiners=("a",)).startswith("No fault: the iteration ended so that new ranks")


def test_a_lost_host_stays_the_first_cause() -> None:
    run = run_without_a_host()
    i = next(i for i, event in enumerate(run.events) if event.kind == "fault")
    late = SyntheticRun(hosts=run.hosts)
    late.fault(0, at=12.5, cause="KeyError: 'mine'", overtaken=True)
    run.events.insert(i + 1, *(e for e in late.events))
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.host_loss is not None
    text = " ".join(describe("restart", restart, report))
    assert "Probably as a consequence, ranks 0 and 2 failed: RuntimeError: Connection" in text
    assert "KeyError" not in text


def mismatch(step: int, *ranks: int, majority: bool = True) -> ReplicaMismatch:
    return ReplicaMismatch(
        host="a",
        time=float(step),
        step=step,
        clean_step=100,
        replicas=4,
        ranks=list(ranks),
        hosts=["b<script>" for _ in ranks],
        majority=majority,
        parameters=["first.weight", "first.bias"],
    )


def test_replicas_that_differ_are_one_sentence_for_each_set_of_ranks() -> None:
    events: list[Event] = [mismatch(200, 2), mismatch(300, 2), mismatch(400, 1, 3, majority=False)]
    report = build(events)
    assert [(each.ranks, each.checks, each.at) for each in report.mismatches] == [
        ((2,), 2, 0.0),
        ((1, 3), 1, 200.0),
    ]
    first, second = (text for text in describe("ending", report) if text.startswith("Parameters"))
    assert first == (
        "Parameters: after step 200, rank 2 on b<script> differed from the other 3 replicas in "
        "first.weight and first.bias, in 2 checks; they were equal after step 100."
    )
    assert "rank 1 on b<script> and rank 3 on b<script> differed, without a majority" in second


def test_a_straggler_is_one_sentence() -> None:
    found = StragglerFound(
        host="a",
        time=5.0,
        step=300,
        straggler=3,
        straggler_host="b",
        seconds=0.15,
        typical_seconds=0.1,
        windows=3,
    )
    report = build([found])
    assert dataclasses.asdict(report)["stragglers"][0]["rank"] == 3
    assert [text for text in describe("ending", report) if text.startswith("Straggler")] == [
        "Straggler: rank 3 on b, found after step 300: 150.0 ms for its own part of a step; the "
        "other ranks took 100.0 ms."
    ]


def test_batches_that_were_left_out_are_one_sentence() -> None:
    found = BatchesSkipped(host="a", time=5.0, step=6, found=8, samples=16, times=1)
    (text,) = [t for t in describe("ending", build([found])) if t.startswith("Values")]
    assert text == (
        "Values were not finite after step 8: training went back to step 6, and left out the "
        "batches of 2 steps (16 samples)."
    )
