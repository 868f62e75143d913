"""Checks of arguments of public functions: every error names the argument."""

from __future__ import annotations

import datetime
import math
from typing import TypeAlias

Duration: TypeAlias = "datetime.timedelta | float"
"""A number of seconds, or a `datetime.timedelta`."""


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raises unless `value` is an `int` (not a `bool`) that is not below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")


def check_callable(name: str, value: object) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")


def as_timedelta(name: str, value: object, *, allow_zero: bool = False) -> datetime.timedelta:
    """Checks and converts a duration.

    Raises:
        TypeError: if it is neither a number of seconds nor a `datetime.timedelta`.
        ValueError: if it is negative, zero where that is not allowed, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | datetime.timedelta):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, not {value!r}")
    if not isinstance(value, datetime.timedelta):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value}")
        try:
            value = datetime.timedelta(seconds=value)
        except OverflowError:
            raise ValueError(f"{name} is too long: {value} s") from None
    if value.total_seconds() < 0 or not (value or allow_zero):
        wanted = "must not be negative" if allow_zero else "must be positive"
        raise ValueError(f"{name} {wanted}, not {value}")
    return value


def as_wait(name: str, value: object) -> datetime.timedelta | None:
    """Checks and converts the limit of a wait. `None` is no limit; a negative one, the time left
    until a deadline that has passed, is zero.
    """
    if value is None:
        return None
    negative = isinstance(value, int | float | datetime.timedelta) and seconds(value) < 0
    return as_timedelta(name, 0.0 if negative else value, allow_zero=True)


def seconds(value: Duration) -> float:
    """A duration in seconds."""
    return value.total_seconds() if isinstance(value, datetime.timedelta) else float(value)
