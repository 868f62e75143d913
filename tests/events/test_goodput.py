"""Goodput: each moment of a run is productive or lost for one reason; the numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.synthetic_run import ABORT, RESTART, SEEN, SyntheticRun
from events.test_report_build import _events
from outlast.events.event import Event
from outlast.events.report import Report, build
from outlast.events.report.intervals import difference, intersection, length, union
from outlast.events.report.sentences import describe
from outlast.events.types import (
    BarrierPassed,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRestored,
    Fault,
    Joined,
    LeftFunction,
    NothingToRestore,
    StepsDone,
)


def save(run: SyntheticRun, step: int, began: float, blocked: float = 0.25) -> None:
    """A save on every rank, committed half a second after it began."""
    for member in run.view:
        event = CheckpointCommitted(step=step, blocked_seconds=blocked, seconds=0.5)
        own(run, member, event, began + 0.5)


def restored(run: SyntheticRun, step: int, at: float) -> None:
    for member in run.view:
        own(run, member, CheckpointRestored(step=step, source="storage", seconds=0.25), at)


def own(run: SyntheticRun, member: int, event: Event, at: float) -> None:
    """An event of a checkpointer or a `Job`, which know neither iteration nor member."""
    run.write(member, event, at)
    run.events[-1] = dataclasses.replace(run.events[-1], iteration=-1, member=-1)


def lost(report: Report) -> dict[str, float]:
    """The parts that are not zero; checks that all parts add up to the wall time."""
    (host,) = report.hosts
    parts = dataclasses.asdict(host.lost)
    waiting = parts.pop("replacements")
    of_restarts = parts.pop("restart_parts")
    assert sum(of_restarts.values()) == pytest.approx(parts["restart"])
    assert of_restarts["replacements"] == waiting
    assert host.productive_seconds + sum(parts.values()) == pytest.approx(host.wall_seconds)
    return {name: value for name, value in {**parts, "waiting": waiting}.items() if value}


def run_with_redone_steps() -> SyntheticRun:
    run = SyntheticRun()
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 1.0)
    save(run, 10, began=5.0)
    save(run, 20, began=9.0)
    run.fault(2, at=16.0)
    for member in (0, 1, 3):
        own(run, member, StepsDone(first=0, last=31), 16.0)
    own(run, 2, StepsDone(first=0, last=30), 16.0)
    run.restart(at=16.0)  # in the function from 16.5 on
    restored(run, 20, at=17.5)
    run.complete(at=26.5)
    return run


def test_steps_after_the_restored_one_are_lost() -> None:
    report = build(run_with_redone_steps().events)
    assert lost(report) == {
        "restart": RESTART,
        "setup": 1.0 + 1.0,
        "saves": 0.25 + 0.25,
        "redone": 16.0 - 9.25,  # since the save of step 20, without the time blocked by it
    }
    (host,) = report.hosts
    assert (host.wall_seconds, host.productive_seconds) == (26.5, 26.5 - 9.75)
    assert report.goodput == 16.75 / 26.5
    assert (report.redone_steps, report.steps_from, report.redone_known) == (11, "steps", True)
    assert report.restarts[0].redone_steps == 11
    assert describe("redone", report)[0] == "11 steps had to be done again, after all restarts."


def test_the_state_of_a_living_rank_costs_only_the_steps_after_it() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 1.0)
    save(run, 10, began=6.0, blocked=0.0)
    for member, done in ((0, 31), (1, 31), (2, 30), (3, 30)):
        own(run, member, StepsDone(first=0, last=done), 16.5)
    run.fault(2, at=17.0)
    run.restart(at=17.0)
    for member in run.view:
        source = "replica" if member == 2 else "live"
        own(run, member, CheckpointRestored(step=30, source=source, seconds=0.5), 18.5)
    run.complete(at=28.5)
    report = build(run.events)
    assert lost(report)["redone"] == pytest.approx((16.5 - 6.0) / 21)  # one step
    assert report.restarts[0].redone_steps == 1
    assert report.saves is not None
    assert report.saves.restored == ((30, "the ranks' own state, sent to rank 2"),)


@pytest.mark.parametrize("source", ["live", "replica"])
def test_the_newest_state_of_a_living_rank_costs_nothing(source: str) -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 1.0)
    for member in run.view:
        own(run, member, StepsDone(first=0, last=30), 16.5)
    run.fault(2, at=17.0)
    run.restart(at=17.0)
    for member in run.view:
        own(run, member, CheckpointRestored(step=30, source=source), 18.5)
    run.complete(at=28.5)
    report = build(run.events)
    assert "redone" not in lost(report)
    assert report.restarts[0].redone_steps == 0


def test_the_initial_state_is_restored() -> None:
    """No save in between: everything before the fault is done again."""
    run = SyntheticRun()
    run.begin(at=0.0)
    restored(run, 500, at=1.0)  # of an earlier run
    run.fault(1, at=11.0)
    own(run, 0, StepsDone(first=500, last=540), 11.0)
    run.restart(at=11.0)
    restored(run, 500, at=12.5)
    run.fault(1, at=14.5)
    own(run, 0, StepsDone(first=500, last=510), 14.5)
    run.restart(at=14.5)
    restored(run, 500, at=16.0)
    run.complete(at=20.0)
    report = build(run.events)
    assert lost(report) == {
        "restart": 2 * RESTART,
        "setup": 3 * 1.0,
        "redone": 10.0 + 2.0,
    }
    assert [restart.redone_steps for restart in report.restarts] == [40, 10]
    assert report.redone_steps == 50


def test_a_restore_further_back_discards_two_iterations() -> None:
    """The checkpoint of step 20 is damaged, so that the third iteration starts from step 10."""
    run = SyntheticRun()
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 0.25)
    save(run, 10, began=5.0, blocked=0.0)
    run.fault(1, at=8.0)
    own(run, 0, StepsDone(first=0, last=15), 8.0)
    run.restart(at=8.0)
    restored(run, 10, at=9.0)
    save(run, 20, began=12.0, blocked=0.0)
    run.fault(1, at=13.0)
    own(run, 0, StepsDone(first=10, last=22), 13.0)
    run.restart(at=13.0)
    restored(run, 10, at=14.0)
    run.complete(at=20.0)
    report = build(run.events)
    assert lost(report)["redone"] == (8.0 - 5.0) + (13.0 - 9.0)
    assert [restart.redone_steps for restart in report.restarts] == [5, 12]


def test_a_snapshot_in_memory_whose_save_was_dropped_counts_from_its_beginning() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(1, at=8.0)
    run.restart(at=8.0)
    own(run, 0, CheckpointFailed(step=7, cause="dropped", seconds=1.5, blocked_seconds=0.5), 8.5)
    restored(run, 7, at=9.0)
    run.complete(at=20.0)
    assert lost(build(run.events))["redone"] == 8.0 - 7.5


def test_a_fault_in_the_first_step_has_no_redone_steps() -> None:
    run = SyntheticRun(hosts=["a"])
    run.begin(at=0.0)
    restored(run, 20, at=1.0)
    own(run, 0, StepsDone(first=20, last=20), 1.5)
    run.fault(0, at=1.5)
    run.restart(at=1.5)
    restored(run, 20, at=3.0)
    run.complete(at=4.0)
    report = build(run.events)
    assert report.redone_steps == 0
    assert describe("redone", report)[0] == "0 steps had to be done again, after all restarts."


def test_without_a_restore_redone_steps_cannot_be_known() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(1, at=8.0)
    run.restart(at=8.0)
    run.complete(at=20.0)
    report = build(run.events)
    assert lost(report) == {"restart": RESTART}
    assert (report.redone_steps, report.redone_known) == (None, False)
    assert describe("redone", report)[0].startswith("Redone steps cannot be known, and count as")


def test_steps_counted_by_pings() -> None:
    run = run_with_redone_steps()
    run.events = [event for event in run.events if not isinstance(event, StepsDone)]
    unknown = build(run.events)
    assert (unknown.redone_steps, unknown.redone_known) == (None, True)
    assert "only the time they took" in describe("redone", unknown)[0]
    run.events = [
        dataclasses.replace(event, pings=32)
        if isinstance(event, LeftFunction) and event.iteration == 0
        else event
        for event in run.events
    ]
    report = build(run.events)
    assert (report.redone_steps, report.steps_from) == (12, "pings")
    assert describe("redone", report)[0].startswith("About 12 steps had")


def test_missing_ranks_are_lost_until_they_are_replaced() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.death(3, at=10.0)
    run.restart(at=10.0, lost=[3])
    run.restart(at=20.5, joiners=["a"])
    run.complete(at=31.0)
    report = build(run.events)
    # The second restart has no fault: its ranks are in the function until they see the end.
    outside = 2 * RESTART - SEEN
    assert lost(report) == {"restart": outside, "reduced": (10.0 + SEEN) / 4}
    assert report.goodput == pytest.approx((31.0 - outside - (10.0 + SEEN) / 4) / 31.0)


def test_a_joiner_that_came_too_late_is_no_part_of_the_wall_time() -> None:
    run = SyntheticRun(hosts=["a"])
    run.begin(at=0.0)
    run.complete(at=10.0)
    run.events.append(Joined(member=7, host="a", pid=77, time=30.0, iteration=0))
    report = build(run.events)
    assert report.hosts[0].wall_seconds == 10.0
    assert report.goodput == 1.0


def test_a_job_that_grows_had_no_missing_ranks() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.restart(at=10.0, joiners=["a"])
    run.complete(at=20.0)
    assert "reduced" not in lost(build(run.events))


def test_the_time_of_a_hang_is_lost_from_the_last_progress_of_a_hung_rank() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(1, at=70.0, interruption="SOFT_TIMEOUT", cause="no progress", idle=60.0)
    run.fault(
        0,
        at=70.25,
        interruption="SOFT_TIMEOUT",
        cause="no progress",
        idle=59.0,
        own_report=True,
        consequence=True,
    )
    run.restart(at=70.0)
    run.complete(at=100.0)
    assert lost(build(run.events)) == {"restart": RESTART, "hang": 59.0}


def test_the_other_host_of_a_hang_waited_as_long() -> None:
    run = SyntheticRun(hosts=["a", "b"], offsets={"a": 0.0, "b": 5000.0})
    run.begin(at=0.0)
    run.fault(0, at=70.0, interruption="SOFT_TIMEOUT", cause="no progress", idle=60.0)
    run.restart(at=70.0)
    run.complete(at=100.0)
    a, b = build(run.events).hosts
    assert a.lost.hang == 60.0
    assert b.lost.hang == pytest.approx(60.0)
    assert b.goodput == pytest.approx((100 - 60 - RESTART + SEEN) / 100)


def test_waiting_for_replacements_is_a_part_of_the_restart() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(1, at=8.0)
    for member in (0, 2, 3):
        event = BarrierPassed(name="replacements", seconds=0.125)
        run.write(member, event, 8.0 + ABORT + 0.25)
    run.restart(at=8.0)
    run.complete(at=20.0)
    assert lost(build(run.events)) == {"restart": RESTART, "waiting": 0.125}


@given(st.lists(_events(), max_size=60))
def test_the_parts_of_any_log_add_up(events: list[Event]) -> None:
    report = build(events)
    for host in report.hosts:
        parts = dataclasses.asdict(host.lost)
        of_restarts = parts.pop("restart_parts")
        assert sum(of_restarts.values()) == pytest.approx(parts["restart"])
        assert all(value >= 0 for value in of_restarts.values())
        assert all(value >= -1e-9 for value in parts.values())
        assert parts.pop("replacements") <= parts["restart"] + 1e-9
        assert host.productive_seconds + sum(parts.values()) == pytest.approx(host.wall_seconds)
    for restart in report.restarts:
        assert restart.redone_steps is None or restart.redone_steps >= 0


_intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(_intervals, _intervals)
def test_intervals_are_sets_of_moments(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    def moments(intervals: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in intervals for moment in range(start, end)}

    a, b = union(one), union(other)
    for found, expected in (
        (a, moments(one)),
        (intersection(a, b), moments(one) & moments(other)),
        (difference(a, b), moments(one) - moments(other)),
    ):
        assert length(found) == len(expected)
        assert all(moments([(int(start), int(end))]) <= expected for start, end in found)


def test_a_fault_of_an_event_log_without_idle_time() -> None:
    run = SyntheticRun(hosts=["a"])
    run.begin(at=0.0)
    run.fault(0, at=8.0, interruption="SOFT_TIMEOUT", cause="no progress")
    run.restart(at=8.0)
    run.complete(at=9.0)
    assert any(isinstance(event, Fault) for event in run.events)
    assert "hang" not in lost(build(run.events))


def test_a_log_without_an_end_counts_up_to_its_last_step() -> None:
    """The job still runs, or its launcher was killed: no rank has left the function."""
    run = run_with_redone_steps()
    end = max(event.time for event in run.events)
    events = [event for event in run.events if event.time < end]
    early = build(events).hosts[0]
    save(run, 40, began=20.0)
    own(run, 1, StepsDone(first=20, last=60), 24.5)
    host = build([event for event in run.events if event.time < end]).hosts[0]
    assert host.wall_seconds == 24.5
    assert early.wall_seconds < host.wall_seconds
    assert host.productive_seconds == pytest.approx(early.productive_seconds + 24.5 - 17.5 - 0.25)


def test_what_a_process_records_after_the_call_is_not_part_of_it() -> None:
    run = run_with_redone_steps()
    before = build(run.events).hosts[0].wall_seconds
    own(run, 0, CheckpointCommitted(step=50, blocked_seconds=0.25, seconds=0.5), 100.0)
    assert build(run.events).hosts[0].wall_seconds == before


def test_an_iteration_that_ended_before_its_restore_is_set_up() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    run.fault(2, at=4.0)
    run.restart(at=4.0)
    for member in run.view:
        own(run, member, NothingToRestore(), 5.0)
    run.complete(at=10.0)
    assert lost(build(run.events)) == {"restart": RESTART, "setup": 4.0 + 0.5}
