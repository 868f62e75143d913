"""ThreadedFinalize returns within its timeout, whatever its function does."""

from __future__ import annotations

import builtins
import functools
import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest

from inprocess.view_strategies import state_of
from outlast.errors import RankTimeout, RestartError
from outlast.inprocess.compose import Compose
from outlast.inprocess.finalize import Finalize, ThreadedFinalize

LONG = timedelta(minutes=5)
STATE = state_of(2, 4)


def test_it_runs_the_function_in_a_thread_and_returns_what_it_got() -> None:
    calls: list[Any] = []

    def fn(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs, threading.current_thread()))
        return "ignored"

    fault = ValueError("train")
    finalize = ThreadedFinalize(LONG, fn, (1, 2), {"key": 3})
    assert isinstance(finalize, Finalize)
    assert finalize(STATE, fault) == (STATE, fault)
    ((args, kwargs, thread),) = calls
    assert (args, kwargs) == ((1, 2), {"key": 3})
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_it_can_be_called_again_and_without_a_fault() -> None:
    calls: list[int] = []
    finalize = ThreadedFinalize(LONG, calls.append, [1])  # type: ignore[arg-type]
    assert finalize(STATE) == (STATE, None)
    assert finalize(STATE) == (STATE, None)
    assert calls == [1, 1]


def test_what_takes_too_long_is_named_and_left_to_itself() -> None:
    release, ended = threading.Event(), threading.Event()

    def never_ends() -> None:
        release.wait(60)
        ended.set()

    start = time.monotonic()
    try:
        with pytest.raises(RankTimeout, match=r"rank 2: .*never_ends .*timeout=0\.2 s") as e:
            ThreadedFinalize(timedelta(seconds=0.2), never_ends)(STATE)
        assert 0.2 <= time.monotonic() - start < 30
        assert isinstance(e.value, RestartError)
        assert isinstance(e.value, builtins.TimeoutError)
        (thread,) = (t for t in threading.enumerate() if t.name == "outlast-run-within")
        assert thread.daemon
    finally:
        release.set()
    assert ended.wait(30)


def test_a_function_without_a_name_is_named_by_its_text() -> None:
    release = threading.Event()
    with pytest.raises(RankTimeout, match=r"functools\.partial\("):
        ThreadedFinalize(timedelta(seconds=0.05), functools.partial(release.wait, 60))(STATE)
    release.set()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_the_function_raises_goes_up(kind: type[BaseException]) -> None:
    error = kind("inside")

    def fn() -> None:
        raise error

    with pytest.raises(kind) as e:
        ThreadedFinalize(LONG, fn)(STATE)
    assert e.value is error
    assert [entry.name for entry in e.traceback][-1] == "fn"


def test_an_error_does_not_keep_itself_alive() -> None:
    class Failure(Exception):
        pass

    def fn() -> None:
        raise Failure

    def run() -> weakref.ref[Failure]:
        try:
            ThreadedFinalize(LONG, fn)(STATE)
        except Failure as e:
            return weakref.ref(e)
        raise AssertionError

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_the_longest_timeout_there_is_does() -> None:
    ThreadedFinalize(timedelta.max, lambda: None)(STATE)


def test_finalizes_compose() -> None:
    order: list[str] = []
    composed = Compose(
        ThreadedFinalize(LONG, order.append, ("second",)),
        ThreadedFinalize(LONG, order.append, ("first",)),
    )
    fault = ValueError("train")
    assert composed(STATE, fault) == (STATE, fault)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("timeout", "3", TypeError),
        ("timeout", timedelta(0), ValueError),
        ("timeout", timedelta(seconds=-1), ValueError),
        ("fn", "print", TypeError),
        ("args", "word", TypeError),
        ("kwargs", [1], TypeError),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, error: type[Exception]) -> None:
    arguments: dict[str, Any] = {"timeout": LONG, "fn": print, name: value}
    with pytest.raises(error, match=rf"^{name} must be"):
        ThreadedFinalize(**arguments)
