"""Interruption records are converted to strings and parsed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.inprocess.attribution import Interruption, InterruptionRecord


@given(st.integers(0, 100_000), st.sampled_from(Interruption))
def test_it_comes_back_as_it_was(rank: int, kind: Interruption) -> None:
    record = InterruptionRecord(rank, kind)
    assert InterruptionRecord.from_str(str(record)) == record


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


@pytest.mark.parametrize("text", ["", "3", "TERMINATED", "x:TERMINATED", "3:", "3:DEAD", ":"])
def test_what_is_no_record_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an interruption record: .*RANK:KIND") as e:
        InterruptionRecord.from_str(text)
    assert repr(text) in str(e.value)
