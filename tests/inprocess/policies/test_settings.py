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


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [True, "1", None])
def test_a_duration_is_seconds_or_a_timedelta(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        Wrapper(**{name: value})


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [s(-1), -1, -0.5, float("nan")])
def test_a_duration_is_positive(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Wrapper(**{name: value})


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


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_not_zero(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Wrapper(**{name: s(0)})


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


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("value", [1, "x", object, lambda *a: a])
def test_a_part_is_an_instance_of_its_kind(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        Wrapper(**{name: value})


@pytest.mark.parametrize("name", ["rank_assignment", "grow_policy"])
def test_what_there_must_be(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Wrapper(**{name: None})


@pytest.mark.parametrize("value", [None, 1, "TCPStore", dict, lambda: None])
def test_the_store_factory_is_a_class_of_stores(value: Any) -> None:
    with pytest.raises(TypeError, match="store_factory"):
        Wrapper(store_factory=value)
    Wrapper(store_factory=FileStore, store_kwargs={"file_name": "x"})


@pytest.mark.parametrize("value", [1, "port=1", ["port"]])
def test_store_kwargs_are_a_mapping(value: Any) -> None:
    with pytest.raises(TypeError, match="store_kwargs"):
        Wrapper(store_kwargs=value)


def test_the_logfile_is_an_absolute_path() -> None:
    with pytest.raises(TypeError, match="monitor_process_logfile"):
        Wrapper(monitor_process_logfile=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="monitor_process_logfile"):
        Wrapper(monitor_process_logfile="monitor.log")
    Wrapper(monitor_process_logfile="/tmp/monitor-{rank}.log")


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_enabled_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="enabled"):
        Wrapper(enabled=value)


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


def test_only_functions_are_decorated() -> None:
    with pytest.raises(TypeError, match="decorates"):
        Wrapper()(3)  # type: ignore[type-var]


async def a_coroutine() -> None: ...


def a_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [a_coroutine, a_generator, 3])
def test_what_is_no_plain_function_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="Wrapper decorates"):
        Wrapper()(function)


def test_a_prefix_store_is_no_factory_of_connections() -> None:
    with pytest.raises(ValueError, match="store_factory"):
        Wrapper(store_factory=PrefixStore)
