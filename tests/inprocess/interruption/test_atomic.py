"""`atomic()` against the start of a restart: one of the two comes first."""

from __future__ import annotations

import threading

import pytest

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.interrupter import AtomicSection, Interrupter


@pytest.fixture
def atomic() -> AtomicSection:
    return AtomicSection(Interrupter())


def begin(atomic: AtomicSection) -> tuple[threading.Thread, threading.Event]:
    begun = threading.Event()

    def work() -> None:
        atomic.begin_termination()
        begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, begun


def test_a_termination_waits_until_the_outermost_block_is_left(atomic: AtomicSection) -> None:
    with atomic:
        thread, begun = begin(atomic)
        with atomic:  # it may be entered again: the termination has not started
            assert not begun.is_set()
        assert not begun.is_set()
    thread.join()
    assert begun.is_set()


def test_it_cannot_be_entered_once_a_termination_has_begun(atomic: AtomicSection) -> None:
    atomic.begin_termination()
    for _ in range(2):
        with pytest.raises(RankShouldRestart, match="not entered"), atomic:
            pytest.fail("inside")
    atomic.reset()
    with atomic:
        pass


def test_an_exception_leaves_it(atomic: AtomicSection) -> None:
    with pytest.raises(ValueError, match="mine"), atomic, atomic:
        raise ValueError("mine")
    atomic.begin_termination()  # does not wait


def test_a_refused_entry_leaves_no_shield() -> None:
    interrupter = Interrupter()
    atomic = AtomicSection(interrupter)
    atomic.begin_termination()
    with pytest.raises(RankShouldRestart), atomic:
        pass
    assert interrupter._shields == 0


def test_many_entries_against_many_terminations(atomic: AtomicSection) -> None:
    inside, met = threading.Event(), []
    for _ in range(200):
        thread, begun = begin(atomic)
        try:
            with atomic:
                inside.set()
                met.append(begun.is_set())
                inside.clear()
        except RankShouldRestart:
            assert atomic._terminating
        thread.join()
        atomic.reset()
    assert not any(met)
