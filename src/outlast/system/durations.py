"""Durations in arguments: a number of seconds or a `datetime.timedelta`, checked in one place."""

from __future__ import annotations

import datetime
import math
from typing import TypeAlias

Duration: TypeAlias = "datetime.timedelta | float"
"""A number of seconds, or a `datetime.timedelta`."""

_ZERO = datetime.timedelta()


def as_timedelta(name: str, value: object, *, allow_zero: bool = False) -> datetime.timedelta:
    """Checks and converts a duration.

    Args:
        name: of the argument, for errors.
        value: what the user gave.
        allow_zero: whether a duration of zero is valid.

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
    if value < _ZERO or (value == _ZERO and not allow_zero):
        wanted = "must not be negative" if allow_zero else "must be positive"
        raise ValueError(f"{name} {wanted}, not {value}")
    return value


def seconds(value: Duration) -> float:
    """A duration in seconds."""
    return value.total_seconds() if isinstance(value, datetime.timedelta) else float(value)
