"""Interruption records are converted to strings and parsed again."""

from __future__ import annotations

from outlast.inprocess.attribution import Interruption, InterruptionRecord


def test_the_text_can_be_read() -> None:
    assert str(InterruptionRecord(3, Interruption.SOFT_TIMEOUT)) == "3:SOFT_TIMEOUT"


def test_the_kinds_are_those_of_the_api() -> None:
    assert [kind.name for kind in Interruption] == [
        "EXCEPTION",
        "BASE_EXCEPTION",
        "SOFT_TIMEOUT",
        "HARD_TIMEOUT",
        "TERMINATED",
        "UNRESPONSIVE",
    ]
