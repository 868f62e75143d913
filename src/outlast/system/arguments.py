"""Checks of arguments of public functions: every error names the argument."""

from __future__ import annotations

import datetime
import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Duration: TypeAlias = datetime.timedelta | float
"""A number of seconds, or a `datetime.timedelta`."""


def as_int(name: str, value: object, *, at_least: int | None = None) -> int:
    """Checks and converts an integer: an `int`, or one of NumPy's, but not a `bool`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    return int(value)


def as_number(name: str, value: Any) -> float:
    """A number of Python or NumPy, or a tensor of one element; else a `TypeError`."""
    try:
        if not isinstance(value, str | bytes):
            return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise TypeError(f"{name} must be a number, not {value!r:.200}")


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raises as `as_int` does."""
    as_int(name, value, at_least=at_least)


def check_options(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """A `TypeError` for the first option of `owner` that is not allowed, with a similar one."""
    known = sorted(allowed)
    for name in given:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; it has {', '.join(known)}"
            raise TypeError(f"{owner}() has no option {name!r}{hint}")


@functools.cache
def options_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters that can be passed to a function or class by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in found if p.kind in by_name)


def check_callable(name: str, value: object) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")


def as_timedelta(name: str, value: object, *, allow_zero: bool = False) -> datetime.timedelta:
    """Checks and converts a duration: finite and positive, or zero where that is allowed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | datetime.timedelta):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, not {value!r}")
    if not isinstance(value, datetime.timedelta):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value}")
        try:
            value = datetime.timedelta(seconds=float(value))
        except OverflowError:
            raise ValueError(f"{name} is too long: {value} s") from None
    if value.total_seconds() < 0 or not (value or allow_zero):
        wanted = "must not be negative" if allow_zero else "must be positive"
        raise ValueError(f"{name} {wanted}, not {value}")
    return value


def as_wait(name: str, value: object) -> datetime.timedelta | None:
    """Checks and converts the limit of a wait: `None` is none; one that is over, negative, zero."""
    if value is None:
        return None
    negative = value < 0 if isinstance(value, numbers.Real) else False
    if isinstance(value, datetime.timedelta):
        negative = value < datetime.timedelta(0)
    return as_timedelta(name, 0.0 if negative else value, allow_zero=True)


def seconds(value: Duration) -> float:
    """A duration in seconds."""
    return value.total_seconds() if isinstance(value, datetime.timedelta) else float(value)
