"""Which frames of this package the user sees in an error of a wrapped call."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import outlast
from outlast.errors import InternalError, OutlastError, RestartAbort, StoreError
from outlast.inprocess.interruption.error_kinds import remove_own_frames
from outlast.inprocess.interruption.interrupter import Interrupter
from outlast.system.arguments import as_int


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised_in_a_function(function: Callable[[], Any]) -> BaseException:
    _, error = Interrupter().run(function)
    assert error is not None
    return error


def fails(error: BaseException) -> Callable[[], Any]:
    def function() -> None:
        raise error

    return function


def misuses() -> None:
    as_int("size", "3")


def own_code(error: BaseException) -> Callable[[], Any]:
    """A function of this package that raises `error`."""
    code = compile("def own() -> None:\n    raise error", outlast.__file__, "exec")
    names: dict[str, Any] = {"error": error}
    exec(code, names)
    found: Callable[[], Any] = names["own"]
    return found


def calls(function: Callable[[], Any]) -> Callable[[], Any]:
    def user() -> None:
        function()

    return user


def test_what_leads_to_the_function_is_removed() -> None:
    error = raised_in_a_function(fails(KeyError("x")))
    assert names(error) == ["run", "user_region", "function"]
    remove_own_frames(error)
    assert names(error) == ["function"]


@pytest.mark.parametrize("error", [OutlastError("x"), KeyError("x")])
def test_the_causes_too(error: Exception) -> None:
    cause = raised_in_a_function(fails(ValueError("first")))
    error.__cause__ = cause
    remove_own_frames(raised_in_a_function(fails(error)))
    assert error.__cause__ is cause
    assert names(cause) == names(error) == ["function"]


def test_a_mistake_of_the_user_ends_where_the_user_made_it() -> None:
    error = raised_in_a_function(misuses)
    assert "as_int" in names(error)
    remove_own_frames(error)
    assert names(error) == ["misuses"]


@pytest.mark.parametrize(
    ("error", "in_function", "outside"),
    [
        (StoreError("on purpose"), ["user"], []),
        (RestartAbort("on purpose"), ["user"], []),
        (InternalError("a bug"), ["user", "own"], ["own"]),
        (KeyError("a bug"), ["user", "own"], ["own"]),
    ],
)
def test_what_may_be_a_mistake_of_this_package_keeps_its_frames(
    error: BaseException, in_function: list[str], outside: list[str]
) -> None:
    remove_own_frames(raised_in_a_function(calls(own_code(error))))
    assert names(error) == in_function
    error.__traceback__ = None
    with pytest.raises(type(error)):
        own_code(error)()
    trace = error.__traceback__
    assert trace is not None
    error.__traceback__ = trace.tb_next  # without this test's frame
    remove_own_frames(error)
    assert names(error) == outside


def test_at_debug_everything_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "outlast.inprocess")
    error = raised_in_a_function(fails(StoreError("x")))
    remove_own_frames(error)
    assert names(error) == ["run", "user_region", "function"]
