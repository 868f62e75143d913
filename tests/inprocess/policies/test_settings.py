"""Every invalid argument of `Wrapper` raises an error that names it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import pytest

from outlast.inprocess import Adaptive, Timeouts, Wrapper
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks
from outlast.inprocess.store import FileStore, PrefixStore


def s(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


DURATIONS = [
    "monitor_thread_interval",
    "monitor_process_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "ping_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "termination_grace_time",
]
PARTS = [
    "initialize",
    "abort",
    "finalize",
    "health_check",
    "rank_assignment",
    "rank_filter",
    "grow_policy",
]


def test_the_defaults_are_those_of_the_spec() -> None:
    found = Wrapper().settings
    assert {name: getattr(found.timeouts, name).total_seconds() for name in DURATIONS} == {
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "progress_watchdog_interval": 1,
        "soft_timeout": 60,
        "hard_timeout": 90,
        "ping_timeout": 600,
        "heartbeat_timeout": 30,
        "barrier_timeout": 120,
        "completion_timeout": 120,
        "termination_grace_time": 5,
    }
    assert type(found.rank_assignment) is ShiftRanks
    assert type(found.abort).__name__ == "AbortTorchDistributed"
    for name in ("initialize", "finalize", "health_check", "rank_filter"):
        assert getattr(found, name) is None
    assert found.monitor_process_logfile is None


WRONG: list[tuple[list[str], type[Exception], list[Any]]] = [
    (DURATIONS, TypeError, [True, "1", None]),
    (DURATIONS, ValueError, [s(-1), -1, -0.5, float("nan"), s(0)]),
    (PARTS, TypeError, [1, "x", object, lambda *a: a]),
    (["rank_assignment", "grow_policy"], TypeError, [None]),
    (["store_factory"], TypeError, [None, 1, "TCPStore", dict, lambda: None]),
    (["store_factory"], ValueError, [PrefixStore]),  # no connections of its own
    (["store_kwargs"], TypeError, [1, "port=1", ["port"]]),
    (["monitor_process_logfile"], TypeError, [3]),
    (["monitor_process_logfile"], ValueError, ["monitor.log"]),
    (["enabled"], TypeError, [1, None, "yes"]),
]


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [(name, error, value) for names, error, values in WRONG for name in names for value in values],
)
def test_a_wrong_argument_is_refused_by_name(name: str, error: type[Exception], value: Any) -> None:
    with pytest.raises(error, match=rf"^{name} "):
        Wrapper(**{name: value})


def test_what_is_not_refused() -> None:
    Wrapper(store_factory=FileStore, store_kwargs={"file_name": "x"})
    Wrapper(monitor_process_logfile="/tmp/monitor-{rank}.log")


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_in_seconds(name: str) -> None:
    seconds = getattr(Timeouts(), name).total_seconds()  # in an order that no other one hurts
    by_name = Wrapper(**{name: seconds}).settings.timeouts
    assert by_name == Wrapper(timeouts=Timeouts(**{name: s(seconds)})).settings.timeouts
    assert getattr(by_name, name) == s(seconds)


def test_the_timeouts_are_one_value() -> None:
    quick = Timeouts(soft_timeout=2, hard_timeout=4)
    assert Wrapper(timeouts=quick).settings.timeouts == quick
    changed = Wrapper(timeouts=quick, hard_timeout=5).settings.timeouts
    assert changed == Timeouts(soft_timeout=2, hard_timeout=5) != quick
    with pytest.raises(dataclasses.FrozenInstanceError):
        quick.soft_timeout = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="timeouts must be a Timeouts, not 30"):
        Wrapper(timeouts=30)  # type: ignore[arg-type]


CONSTRAINTS = [
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
]


@pytest.mark.parametrize(("small", "large"), CONSTRAINTS)
def test_the_order_of_the_timeouts(small: str, large: str) -> None:
    defaults: Any = Timeouts()
    # By the smaller one alone, and by the larger one alone, so that no other constraint is hurt.
    for changes in (
        {small: getattr(defaults, large)},
        {small: getattr(defaults, large) + s(0.001)},
    ):
        if small == "heartbeat_timeout":
            changes["barrier_timeout"] = defaults.barrier_timeout
        with pytest.raises(ValueError, match=rf"{small}.*must be less than {large}"):
            Wrapper(**changes)
    Wrapper(**{small: getattr(defaults, large) - s(0.001)}) if small != "hard_timeout" else None


def test_arguments_are_by_name_and_known() -> None:
    with pytest.raises(TypeError):
        Wrapper(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'soft_time'; did you mean 'soft_timeout'"):
        Wrapper(soft_time=s(1))
    with pytest.raises(TypeError, match="no option 'event_snk'; did you mean 'event_sink'"):
        Wrapper(event_snk=1)


def test_an_adaptive_timeout_is_judged_by_its_bound() -> None:
    assert Wrapper(soft_timeout=Adaptive(initial=s(20))).settings.timeouts.soft == s(20)
    with pytest.raises(ValueError, match="soft_timeout"):
        Wrapper(soft_timeout=Adaptive(initial=s(90)))


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"initial": "3"}, TypeError, "initial"),
        ({"floor": True}, TypeError, "floor"),
        ({"initial": s(0)}, ValueError, "initial"),
        ({"floor": s(-1)}, ValueError, "floor"),
        ({"floor": s(61)}, ValueError, "floor"),
        ({"factor": 0.5}, ValueError, "factor"),
        ({"deviations": -1.0}, ValueError, "deviations"),
        ({"warmup": 0}, ValueError, "warmup"),
    ],
)
def test_wrong_arguments_of_adaptive(changes: Any, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        Adaptive(**changes)


def test_how_long_a_restart_is_held() -> None:
    assert Wrapper().settings.await_replacements is None
    held = Wrapper(rank_assignment=AwaitReplacements(s(7)))
    assert held.settings.await_replacements == 7


async def a_coroutine() -> None: ...


def a_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [a_coroutine, a_generator, 3])
def test_what_is_no_plain_function_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="Wrapper decorates"):
        Wrapper()(function)
