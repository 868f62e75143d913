"""`atomic()` and the start of a termination: one of the two comes first."""

from __future__ import annotations

import threading

import pytest

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.atomic import AtomicGate
from outlast.inprocess.interruption.interrupter import Interrupter


@pytest.fixture
def gate() -> AtomicGate:
    return AtomicGate(Interrupter())


def begin(gate: AtomicGate) -> tuple[threading.Thread, threading.Event]:
    begun = threading.Event()

    def work() -> None:
        gate.begin_termination()
        begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, begun


def test_a_termination_waits_until_the_outermost_block_is_left(gate: AtomicGate) -> None:
    with gate:
        thread, begun = begin(gate)
        with gate:  # it may be entered again: the termination has not started
            assert not begun.is_set()
        assert not begun.is_set()
    thread.join()
    assert begun.is_set()


def test_it_is_not_entered_any_more_once_a_termination_has_begun(gate: AtomicGate) -> None:
    gate.begin_termination()
    for _ in range(2):
        with pytest.raises(RankShouldRestart, match="not entered"), gate:
            pytest.fail("inside")
    gate.reset()
    with gate:
        pass


def test_an_exception_leaves_it(gate: AtomicGate) -> None:
    with pytest.raises(ValueError, match="mine"), gate, gate:
        raise ValueError("mine")
    gate.begin_termination()  # waits for nobody


def test_a_refused_entry_leaves_no_shield() -> None:
    interrupter = Interrupter()
    gate = AtomicGate(interrupter)
    gate.begin_termination()
    with pytest.raises(RankShouldRestart), gate:
        pass
    assert interrupter._shields == 0


def test_many_entries_against_many_terminations(gate: AtomicGate) -> None:
    inside, met = threading.Event(), []
    for _ in range(200):
        thread, begun = begin(gate)
        try:
            with gate:
                inside.set()
                met.append(begun.is_set())
                inside.clear()
        except RankShouldRestart:
            assert gate._terminating
        thread.join()
        gate.reset()
    assert not any(met)
