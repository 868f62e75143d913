"""The report: first cause, phases, lost ranks, and times that no clock can compare."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.synthetic_run import (
    ABORT,
    ASSIGN,
    FINALIZE,
    HEALTH,
    INTERRUPT,
    RESTART,
    SEEN,
    SyntheticRun,
)
from outlast.events.event import EVENT_TYPES, Event, Note
from outlast.events.report import build, to_json
from outlast.events.report.sentences import cause_text
from outlast.events.types import (
    Decided,
    Entered,
    Fault,
    InterruptSwallowed,
    Joined,
    Lost,
    MonitorRestarted,
    Seen,
    WorkerExited,
    WorkerFailed,
)


def run_with_an_exception() -> SyntheticRun:
    run = SyntheticRun()
    run.begin(at=1.0)
    run.fault(2, at=11.0)
    run.restart(at=11.0, late=0.25)
    run.complete(at=21.5)
    return run


def run_with_a_death() -> SyntheticRun:
    run = SyntheticRun()
    run.begin(at=1.0)
    for peer in (0, 3):  # the echo is written before the monitor's report
        run.fault(peer, at=10.75, cause="connection closed by peer", consequence=True)
    run.death(1, at=11.0)
    run.restart(at=11.0, lost=[1], joiners=["a"])
    run.complete(at=21.5)
    return run


def test_an_exception_is_reported_with_its_rank_and_all_phases() -> None:
    report = build(run_with_an_exception().events)
    (restart,) = report.restarts
    assert restart.cause is not None
    assert (restart.cause.rank, restart.cause.host) == (2, "a")
    assert restart.cause.interruption == "EXCEPTION"
    assert restart.cause.message == "ValueError: a bad batch"
    assert restart.at == 10.0  # from the first event of the host
    phases = restart.phases
    assert phases.detection == SEEN + 0.25
    assert phases.abort == ABORT
    assert phases.interrupt == INTERRUPT
    assert phases.finalize == FINALIZE
    assert phases.health_check == 2 * HEALTH  # after the fault, and before the next entry
    assert phases.termination_barrier == ASSIGN  # the last to arrive waits least
    assert phases.start_barrier == phases.initialize == phases.assignment == ASSIGN
    assert phases.total == RESTART
    assert not phases.total_from_seen


def test_totals() -> None:
    report = build(run_with_an_exception().events)
    assert (report.calls, report.world_size, report.completed) == (1, 4, 4)
    assert (report.lost, report.joined, report.replaced) == (0, 0, 0)
    assert report.recovery_seconds == RESTART
    (host,) = report.hosts
    assert host.wall_seconds == 20.5
    assert host.productive_seconds == 20.0
    assert report.goodput == host.goodput == 20.0 / 20.5


def test_a_death_known_only_to_its_monitor_is_the_first_cause() -> None:
    report = build(run_with_a_death().events)
    (restart,) = report.restarts
    assert restart.cause is not None
    assert (restart.cause.rank, restart.cause.interruption) == (1, "TERMINATED")
    assert [(other.rank, other.consequence) for other in restart.others] == [(0, True), (3, True)]
    (lost,) = restart.lost
    assert (lost.rank, lost.member, lost.reason) == (1, 1, "terminated")
    (joined,) = restart.joined
    assert (joined.rank, joined.member) == (3, 4)
    assert (restart.world_size_before, restart.world_size_after) == (4, 4)
    assert (report.lost, report.joined, report.replaced) == (1, 1, 1)


def test_an_echo_is_the_cause_where_there_is_nothing_else() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(3, at=1.0, consequence=True)
    run.restart(at=1.0)
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.rank == 3


def test_the_launcher_knows_how_a_process_died() -> None:
    run = run_with_a_death()
    run.events.append(
        WorkerExited(host="a", pid=1, time=11.0, worker_pid=1001, exit_code=-9, member=-1)
    )
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.exit == "killed by SIGKILL"


def test_the_cause_of_a_hang_is_not_the_signal_that_ended_it() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    hung = Fault(interruption="HARD_TIMEOUT", cause="no progress for 90 s", idle=4.0)
    run.write(1, hung, 10.0, monitor=True)
    run.write(1, Lost(reason="terminated"), 10.5, monitor=True)
    run.restart(at=11.0, lost=[1], joiners=["a"])
    run.complete(at=20.0)
    run.events.append(WorkerExited(host="a", pid=1, time=11.0, worker_pid=1001, exit_code=-9))
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.cause is not None
    assert restart.cause.exit == "killed by SIGKILL"
    assert cause_text(restart) == "rank 1: no progress"
    assert [count.what for count in report.causes] == ["no progress"]


def test_how_a_survivor_ended_later_is_no_part_of_its_fault() -> None:
    run = run_with_an_exception()
    for member in range(4):
        run.events.append(
            WorkerExited(host="a", pid=1, time=22.0, worker_pid=1000 + member, exit_code=0)
        )
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.exit == ""


def test_a_fault_that_two_processes_report_counts_once() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(0, at=1.0, interruption="BASE_EXCEPTION", cause="SystemExit: 3")
    run.death(0, at=1.25)
    run.restart(at=1.0, lost=[0])
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.message == "SystemExit: 3"
    assert restart.others == ()


def test_clocks_of_two_hosts_are_never_compared() -> None:
    run = SyntheticRun(hosts=["a", "a", "b", "b"], offsets={"a": 0.0, "b": 90_000.0})
    run.begin(at=0.0)
    run.fault(3, at=5.0)
    run.restart(at=5.0, late=0.25)
    run.complete(at=10.5)
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.at == 5.0
    assert restart.phases.detection == SEEN + 0.25  # of the survivors on host b
    assert restart.phases.total == RESTART


def test_a_host_that_had_seen_the_end_did_not_begin_it() -> None:
    run = SyntheticRun(hosts=["a", "b"], offsets={"a": 500.0, "b": 0.0})
    run.begin(at=0.0)
    run.fault(1, at=5.0, cause="the first")
    run.restart(at=5.0)
    # Rank 0's own fault has the lower rank, and its host's clock is no evidence.
    run.iteration = 0
    run.fault(0, at=5.0 + 2 * SEEN, cause="after it had seen")
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.message == "the first"


def test_the_first_cause_is_that_on_which_the_ranks_decided() -> None:
    run = SyntheticRun(hosts=["a", "b", "c"], offsets={"b": -50.0})
    run.begin(at=0.0)
    run.fault(0, at=1.0, cause="ValueError: reported first")
    run.fault(1, at=1.0, cause="ValueError: by the clock of its host, long before")
    run.restart(at=1.0, lost=[2])
    run.events = [e for e in run.events if e.member != 2]  # its log went with its host
    run.events.append(Decided(iteration=0, host="a", pid=1000, time=99.0, joined=[1]))
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.message == "ValueError: reported first"
    assert [(party.rank, party.member, party.host) for party in restart.lost] == [(2, 2, "")]
    assert restart.joined == (), "of two records of a decision, the first one counts"


def test_an_echo_on_another_host_is_not_the_first_cause() -> None:
    run = SyntheticRun(hosts=["a", "b", "a"])
    run.begin(at=0.0)
    run.fault(0, at=4.75, cause="connection closed by peer", consequence=True)
    run.death(1, at=5.0)
    run.restart(at=5.0, lost=[1])
    (restart,) = build(run.events).restarts
    assert restart.cause is not None
    assert restart.cause.rank == 1
    assert [other.rank for other in restart.others] == [0]


def test_without_a_survivor_on_its_host_the_total_begins_where_it_was_seen() -> None:
    run = SyntheticRun(hosts=["a", "b", "b"])
    run.begin(at=0.0)
    run.death(0, at=5.0)
    run.restart(at=5.0, lost=[0])
    (restart,) = build(run.events).restarts
    assert restart.phases.detection is None
    assert restart.phases.total == RESTART - SEEN
    assert restart.phases.total_from_seen


def test_a_joiner_ends_an_iteration_without_a_fault() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.restart(at=5.0, joiners=["a"])
    (restart,) = build(run.events).restarts
    assert restart.cause is None
    assert [party.rank for party in restart.joined] == [2]
    assert (restart.world_size_before, restart.world_size_after) == (2, 3)


def test_a_fault_that_ends_the_run_is_reported() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=5.0)
    run.write(0, Seen(reason="fault"), 5.0)
    report = build(run.events)
    (restart,) = report.restarts
    assert not restart.resumed
    assert restart.phases.total is None
    assert report.completed == 0


def run_that_fails_before_the_entry() -> SyntheticRun:
    """Into iteration 1: its `initialize` raises."""
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.fault(1, at=5.0)
    run.restart(at=5.0)
    run.events = [
        event for event in run.events if not (isinstance(event, Entered) and event.iteration == 1)
    ]
    run.fault(0, at=5.5, cause="in initialize")
    return run


def test_a_fault_before_the_entry_leads_to_the_restart_after() -> None:
    run = run_that_fails_before_the_entry()
    run.restart(at=5.5)
    report = build(run.events)
    first, second = report.restarts
    assert first.resumed  # by the second: it did not end the job
    assert first.phases.total is None
    assert second.cause is not None
    assert second.cause.message == "in initialize"
    assert second.phases.total == RESTART
    assert report.restart_count == 2


def test_a_job_that_ends_before_the_entry_has_not_resumed() -> None:
    run = run_that_fails_before_the_entry()
    assert [each.resumed for each in build(run.events).restarts] == [False, False]


def test_each_call_of_a_wrapper_counts_its_iterations_from_zero() -> None:
    run = run_with_an_exception()
    run.iteration = 0
    run.begin(at=30.0)
    run.fault(1, at=31.0, interruption="TERMINATED", cause="in the second call")
    run.restart(at=31.0, lost=[1], joiners=["a"])
    run.complete(at=32.0)
    report = build(run.events)
    assert report.calls == 2
    first, second = report.restarts
    assert (first.call, second.call) == (0, 1)
    assert second.cause is not None
    assert second.cause.message == "in the second call"
    assert [party.member for party in second.joined] == [4]
    assert report.completed == 4
    assert report.hosts[0].wall_seconds == 20.5 + 2.0


def test_notes_are_counted_and_waiting_joiners_reported() -> None:
    run = run_with_an_exception()
    for _ in range(3):
        run.write(0, Note(name="checkpoint.saved"), 12.0)
    run.write(0, MonitorRestarted(), 12.0)
    run.write(1, InterruptSwallowed(where="train.py:7", iteration=0), 11.0)
    run.events.append(Joined(member=9, host="b", pid=77, time=3.0, iteration=-1))
    report = build(run.events)
    assert report.notes == {"checkpoint.saved": 3}
    assert report.monitors_restarted == 1
    assert [party.member for party in report.waiting] == [9]
    assert report.restarts[0].swallowed == ("train.py:7",)


def test_nothing_at_all() -> None:
    report = build([])
    assert report.restarts == ()
    assert report.goodput is None
    assert '"restarts": []' in to_json(report)


@pytest.mark.parametrize("make", [run_with_an_exception, run_with_a_death])
def test_the_order_of_files_does_not_matter(make: object) -> None:
    events = make().events  # type: ignore[operator]
    processes = sorted({event.pid for event in events})
    for seed in range(5):
        random.Random(seed).shuffle(processes)
        shuffled = [event for pid in processes for event in events if event.pid == pid]
        assert build(shuffled) == build(events)


def _events() -> st.SearchStrategy[Event]:
    small = st.integers(-1, 3)
    common = {
        "iteration": small,
        "member": small,
        "rank": small,
        "host": st.sampled_from(["a", "b"]),
        "pid": st.integers(1, 4),
        "time": st.floats(0, 100),
    }
    return st.one_of([st.builds(kind, **common) for kind in EVENT_TYPES.values()])


@given(st.lists(_events(), max_size=60))
def test_any_events_make_a_report(events: list[Event]) -> None:
    report = build(events)
    assert to_json(report)
    for restart in report.restarts:
        phases = restart.phases
        for seconds in (phases.detection, phases.interrupt, phases.total):
            assert seconds is None or seconds >= 0
        others = {other.consequence for other in restart.others}
        assert restart.cause is None or not (restart.cause.consequence and False in others)
    for host in report.hosts:
        assert host.productive_seconds >= 0
    # Without a wrapped call, the launcher's records of failed processes are the faults.
    faults = sum(isinstance(event, Fault | WorkerFailed | WorkerExited) for event in events)
    assert sum((r.cause is not None) + len(r.others) for r in report.restarts) <= faults


@pytest.mark.slow
def test_a_thousand_restarts_make_a_report_in_one_pass() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    for moment in range(1, 1001):
        run.fault(moment % 4, at=float(moment))
        run.restart(at=float(moment))
    run.complete(at=1002.0)
    report = build(run.events)
    assert len(report.restarts) == 1000
    assert all(restart.phases.total == RESTART for restart in report.restarts)


def test_each_survivor_has_its_own_recovery() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(3, at=8.0)
    run.death(2, at=8.0)
    run.restart(at=8.0, lost=[2], joiners=["a"])
    run.write(0, Seen(iteration=0), 9.0, monitor=True)
    # Rank 0 learns of the fault before it has entered.
    entered = next(e for e in run.events if isinstance(e, Entered) and e.member == 0)
    run.events.remove(entered)
    (restart,) = build(run.events).restarts
    assert [rank.rank for rank in restart.ranks] == [0, 1, 3]
    first, _, failed = restart.ranks
    assert (first.start, failed.start) == (8.0 + SEEN, 8.0), "its own fault"
    assert first.end == 8.0 + RESTART
    spans = {phase.state: (phase.start, phase.end) for phase in first.phases}
    assert set(spans) == {"abort", "leave", "finalize", "health", "term", "assign", "start", "init"}
    left = first.start + ABORT + INTERRUPT
    assert spans["abort"] == (first.start, first.start + ABORT)
    assert spans["leave"] == (first.start + ABORT, left)
    assert spans["finalize"] == (left, left + FINALIZE)
