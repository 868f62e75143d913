"""Checks of arguments of public functions; every error names the argument. See `durations` too."""

from __future__ import annotations


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raises unless `value` is an `int` (no `bool`) that is not below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")


def check_callable(name: str, value: object) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
