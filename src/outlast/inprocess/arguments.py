"""Checks of what users pass to the parts; every error names the argument."""

from __future__ import annotations

import datetime

__all__ = ["check_callable", "check_int", "check_timeout"]


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raises unless `value` is a whole number (no `bool`) that is not below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")


def check_timeout(name: str, value: object) -> None:
    """Raises unless `value` is a `datetime.timedelta` above zero."""
    if not isinstance(value, datetime.timedelta):
        raise TypeError(f"{name} must be a datetime.timedelta, not {value!r}")
    if value <= datetime.timedelta(0):
        raise ValueError(f"{name} must be longer than zero, not {value}")


def check_callable(name: str, value: object) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
