"""The completed steps in the event log: few events, and the last one is never missing."""

from __future__ import annotations

from fake_clock import FakeClock
from outlast.elastic.job.counters import StepEvents
from outlast.events import Emitter, MemorySink, StepsDone


def recorded(sink: MemorySink) -> list[tuple[int, int]]:
    return [(event.first, event.last) for event in sink.events if isinstance(event, StepsDone)]


def test_an_event_every_ten_seconds_and_one_at_the_end() -> None:
    clock, sink = FakeClock(), MemorySink()
    steps = StepEvents(Emitter(sink, clock=clock))
    steps.begin(100)
    for step in range(101, 126):
        clock.advance(1.0)
        steps.completed(step)
    assert recorded(sink) == [(100, 110), (100, 120)]
    steps.write()
    steps.write()
    assert recorded(sink)[2:] == [(100, 125)]


def test_another_restore_begins_anew() -> None:
    sink = MemorySink()
    steps = StepEvents(Emitter(sink, clock=FakeClock()))
    steps.begin(0)
    steps.write()
    steps.completed(1)
    steps.begin(20)
    steps.completed(21)
    steps.begin(30)
    steps.write()
    assert recorded(sink) == [(0, 0), (0, 1), (20, 21), (30, 30)]
