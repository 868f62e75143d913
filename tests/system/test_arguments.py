"""Durations: seconds or a timedelta; for anything else the error names the argument."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outlast.system.arguments import as_timedelta, as_wait, seconds


@pytest.mark.parametrize("value", [2, 2.0, timedelta(seconds=2)])
def test_seconds_and_timedeltas_are_the_same(value: Any) -> None:
    assert as_timedelta("timeout", value) == timedelta(seconds=2)
    assert seconds(value) == 2.0


@pytest.mark.parametrize("value", ["2", None, True, [2]])
def test_another_type_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds or a timedelta"):
        as_timedelta("timeout", value)


@pytest.mark.parametrize(
    "value", [0, -1, -0.5, timedelta(0), timedelta(seconds=-1), float("nan"), float("inf"), 1e300]
)
def test_a_wrong_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^timeout "):
        as_timedelta("timeout", value)


def test_zero_where_it_is_allowed() -> None:
    assert as_timedelta("timeout", 0, allow_zero=True) == timedelta(0)
    with pytest.raises(ValueError, match=r"^timeout must not be negative"):
        as_timedelta("timeout", -1, allow_zero=True)


@pytest.mark.parametrize(
    ("value", "limit"),
    [(None, None), (0, 0.0), (-1.5, 0.0), (timedelta(seconds=-1), 0.0), (2, 2.0)],
)
def test_a_wait_is_over_at_once_after_its_deadline(value: Any, limit: float | None) -> None:
    wait = as_wait("timeout", value)
    assert (None if wait is None else wait.total_seconds()) == limit


def test_the_limit_of_a_wait_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds or a timedelta"):
        as_wait("timeout", True)
