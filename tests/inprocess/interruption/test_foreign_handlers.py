"""Handlers of signals that are not this package's, around the user's function."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from outlast.inprocess.interruption.foreign_handlers import ForeignHandlers


def handler(number: int, frame: FrameType | None) -> None:
    raise ValueError("of the program")


@pytest.fixture
def handlers() -> Iterator[ForeignHandlers]:
    found, before = ForeignHandlers(), signal.signal(signal.SIGUSR2, handler)
    yield found
    found.release()
    signal.signal(signal.SIGUSR2, before)


def test_what_a_handler_raises_is_kept_only_outside_the_function(
    handlers: ForeignHandlers,
) -> None:
    handlers.hold()
    assert signal.getsignal(signal.SIGUSR2) is not handler
    with handlers.released():
        assert signal.getsignal(signal.SIGUSR2) is handler
    assert signal.getsignal(signal.SIGUSR2) is not handler


def test_a_handler_that_is_set_between_two_looks_is_guarded(handlers: ForeignHandlers) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for _ in range(3):  # nothing changes: the look ends early
            handlers.hold()
        for _ in range(2):
            signal.signal(signal.SIGUSR1, handler)
            handlers.hold()
            assert signal.getsignal(signal.SIGUSR1) is not handler
    finally:
        handlers.release()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_that_waits_has_few_points_at_which_it_asks_again(
    handlers: ForeignHandlers,
) -> None:
    """It is asked at each call and jump while the handlers are guarded: see `Deferral`."""
    points = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal points
        frame.f_trace_opcodes = True
        points += 1
        return count

    sys.settrace(count)
    try:
        handlers.hold()
    finally:
        sys.settrace(None)
    assert 0 < points < 1000
