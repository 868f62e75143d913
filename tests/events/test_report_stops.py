"""A stop is not a restart, and the ranks that leave then are not lost."""

from __future__ import annotations

from events.synthetic_run import SyntheticRun
from outlast.events import Fault, Lost, Seen, StopRequested, WorkerExited, WorkerStarted
from outlast.events.report import build
from outlast.events.report.sentences import describe


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
