"""The names, the order and the defaults of what users of the first version know, as tables."""

from __future__ import annotations

import datetime
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest

from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller
from outlast.compat.nvrx.checkpointing.async_ckpt import core as nvrx
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


# The order of `AsyncRequest` in each version: the fifth field is not the same one.
REQUESTS: list[tuple[str, Any, str]] = [
    (
        "0.2.1",
        AsyncRequest,
        "async_fn async_fn_args finalize_fns async_fn_kwargs is_frozen",
    ),
    (
        "0.4.1 to 0.7",
        nvrx.AsyncRequest,
        "async_fn async_fn_args finalize_fns async_fn_kwargs preload_fn is_frozen call_idx",
    ),
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


@pytest.mark.parametrize(("version", "request_type", "fields"), REQUESTS)
def test_a_request_has_the_order_of_its_version(
    version: str, request_type: Any, fields: str
) -> None:
    assert list(request_type._fields) == fields.split(), version
    made = request_type(*range(len(fields.split())))
    assert (made.is_frozen, made.freeze().is_frozen) == (fields.split().index("is_frozen"), True)


def test_a_queue_takes_a_request_of_either_order(tmp_path: Any) -> None:
    queue = nvrx.AsyncCallsQueue(persistent=False)
    done: list[str] = []
    for made in (
        AsyncRequest(tmp_path.mkdir, (), [lambda: done.append("0.2")], {"exist_ok": True}, True),
        nvrx.AsyncRequest(
            os.path.join, ("a", None), [lambda: done.append("0.4")], {}, lambda: "b", True, 7
        ),
        nvrx.AsyncRequest(None, (), [lambda: done.append("nothing")], {}, lambda: "b"),
    ):
        queue.schedule_async_request(made)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    queue.close()
    assert done == ["0.2", "0.4", "nothing"]
