"""The names, the order and the defaults of what users of the first version know, as tables."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller
from outlast.inprocess import (
    Wrapper,
    finalize,
    health_check,
    initialize,
    rank_assignment,
    rank_filter,
    store,
)

REQUIRED: Any = inspect.Parameter.empty
WRAPPER: dict[str, Any] = {
    "store_factory": store.TCPStore,
    "store_kwargs": None,
    "initialize": None,
    "finalize": None,
    "health_check": None,
    "rank_filter": None,
    "monitor_thread_interval": 1,
    "monitor_process_interval": 1,
    "progress_watchdog_interval": 1,
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 30,
    "barrier_timeout": 120,
    "completion_timeout": 120,
    "last_call_wait": 1,
    "termination_grace_time": 5,
    "monitor_process_logfile": None,
    "enabled": True,
}
# Positional, in this order.
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (
        AsyncRequest,
        {
            "async_fn": REQUIRED,
            "async_fn_args": REQUIRED,
            "finalize_fns": REQUIRED,
            "async_fn_kwargs": {},
            "is_frozen": False,
        },
    ),
    (AsyncRequest.add_finalize_fn, {"fn": REQUIRED}),
    (
        DistributedAsyncCaller.schedule_async_call,
        {"async_fn": REQUIRED, "save_args": REQUIRED, "save_kwargs": {}},
    ),
    (
        DistributedAsyncCaller.is_current_async_call_done,
        {"blocking": False, "no_dist": True},
    ),
    (AsyncCallsQueue.schedule_async_request, {"async_request": REQUIRED}),
    (AsyncCallsQueue.maybe_finalize_async_calls, {"blocking": False, "no_dist": True}),
    (
        initialize.RetryController,
        {"max_iterations": None, "min_world_size": 1, "min_active_world_size": 1},
    ),
    (
        finalize.ThreadedFinalize,
        {"timeout": REQUIRED, "fn": REQUIRED, "args": (), "kwargs": None},
    ),
    (health_check.CudaHealthCheck, {"timeout": 30}),
    (health_check.FaultCounter, {"max_rank_faults": None}),
    (
        rank_assignment.FilterGroupedByKey,
        {"key_or_fn": REQUIRED, "condition": REQUIRED, "timeout": 60},
    ),
    (rank_filter.MaxActiveWorldSize, {"max_active_world_size": None}),
    (rank_filter.WorldSizeDivisibleBy, {"divisor": 1}),
]


def plain(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, datetime.timedelta) else value


def test_every_argument_of_the_wrapper_is_in_its_help_and_an_attribute() -> None:
    parameters = inspect.signature(Wrapper).parameters
    assert {name: plain(parameters[name].default) for name in WRAPPER} == WRAPPER
    assert {"abort", "rank_assignment"} <= parameters.keys()
    wrapper = Wrapper(**WRAPPER)
    values = {**WRAPPER, "store_kwargs": {}}
    assert {name: plain(getattr(wrapper, name)) for name in WRAPPER} == values
    assert type(wrapper.rank_assignment) is rank_assignment.ShiftRanks
    with pytest.raises(AttributeError, match="no attribute 'soft_timout'"):
        _ = wrapper.soft_timout


@pytest.mark.parametrize(("function", "expected"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_call_takes_what_it_took(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    parameters = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
    found = {p.name: plain(p.default) for p in parameters[: len(expected)]}
    assert list(found.items()) == list(expected.items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(expected)])
