"""The course of a recovery, from the events of its ranks."""

from __future__ import annotations

import pytest

from events.synthetic_run import ABORT, FINALIZE, INTERRUPT, RESTART, SEEN
from metrics.replay import eventful_run
from outlast.events import Entered, Seen
from outlast.metrics.recovery_trace import RecoveryTracker


def test_each_survivor_has_its_phases() -> None:
    tracker = RecoveryTracker()
    for event in eventful_run():
        tracker.apply(event)
    recoveries = tracker.take(0)
    assert [each.rank for each in recoveries] == [0, 1, 2]
    survivor = recoveries[0]
    assert survivor.start == 108.0 + SEEN
    assert survivor.end == 108.0 + RESTART
    spans = {phase.name: (phase.start, phase.end) for phase in survivor.phases}
    assert set(spans) == {"abort", "leave", "finalize", "health", "term", "assign", "start", "init"}
    assert spans["abort"] == (survivor.start, survivor.start + ABORT)
    left = survivor.start + ABORT + INTERRUPT
    assert spans["leave"] == (survivor.start + ABORT, left)
    assert spans["finalize"] == pytest.approx((left, left + FINALIZE))
    assert tracker.take(0) == []
    assert [each.rank for each in tracker.take(1)] == [0, 1]  # rank 2 was lost


def test_a_rank_that_learns_of_a_fault_before_it_has_entered() -> None:
    tracker = RecoveryTracker()
    entered = False
    for event in eventful_run():
        if isinstance(event, Entered) and event.member == 0 and not entered:
            entered = True
            continue
        tracker.apply(event)
    assert [each.rank for each in tracker.take(0)] == [0, 1, 2]


def test_a_monitor_has_no_recovery() -> None:
    tracker = RecoveryTracker()
    for event in eventful_run():
        tracker.apply(event)
    tracker.apply(Seen(host="a", pid=5002, iteration=2, time=141.0))
    tracker.apply(Entered(host="a", pid=5002, iteration=3, time=142.0))
    assert tracker.take(2) == []
