"""Every public duration is a number of seconds or a `timedelta`; anything else is refused at the
call, with an error that names the argument.

The parameters are found by annotation and by name, so a new one fails here until it is checked.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast import async_checkpoint, chaos, elastic, inprocess
from outlast.inprocess import finalize, health_check, rank_assignment, store
from outlast.system.arguments import options_of

Call = Callable[[Path, Any], object]

PACKAGES = ["", "async_checkpoint", "chaos", "elastic", "inprocess"]
PARTS = ["abort", "finalize", "health_check", "initialize", "rank_assignment", "rank_filter"]
MODULES = [*PACKAGES, *(f"inprocess.{part}" for part in [*PARTS, "state", "store"])]
# Not arguments of a user, or not durations.
OTHERS = {
    "CheckpointInfo.metric",
    "Checkpointer.replica_bandwidth",
    "Checkpointer.save.metric",
    "Job.save.metric",
    "Adaptive.factor",
    "Adaptive.deviations",
    "RandomFaults.rate_per_step",
    "StragglerCheck.factor",
    "Moment.seconds",  # made by the injector
    "TCPStore.wait_for_workers",  # a bool
    "run_within.timeout",  # called by parts that have checked theirs
    "RepeatedFaults.pause.times",  # a count
    "seconds.value",
    "Wrapper.timeouts",  # `Timeouts`
}
HANDLES, WAITS = ("PendingSave", "SaveHandle"), ("exception", "result", "wait")
NONE_ALLOWED = {  # no limit, or none given
    "AsyncCallsQueue.close.timeout",
    "CallWrapper.long_phase.limit",
    "Checkpointer.close.timeout",
    "Checkpointer.wait.timeout",
    "Job.every",
    *(f"{handle}.{wait}.timeout" for handle in HANDLES for wait in WAITS),
    "PlannedFault.after_seconds",
    "PlannedFault.seconds",
    "fail_at.after_seconds",
    "fail_at.seconds",
    "fire.seconds",
}
NAMES = re.compile(
    r"time|interval|grace|linger|second|limit|wait|delay|duration|back_?off|cool_?down|_s$"
)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All public functions, classes and methods, by qualified name."""
    for name in MODULES:
        module = importlib.import_module(f"outlast.{name}".rstrip("."))
        for exported in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, exported)
            if not getattr(value, "__module__", "").startswith("outlast"):
                continue
            if isinstance(value, types.FunctionType | type):
                yield value.__qualname__, value
            if isinstance(value, type):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    if not method.startswith("_"):
                        yield f"{value.__qualname__}.{method}", function


def durations() -> set[str]:
    """The names of all public parameters that are, or look like, durations."""
    found = set()
    for owner, function in public():
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            continue  # an enum
        for parameter in parameters:
            annotation = str(parameter.annotation)
            typed = re.search(r"Duration|timedelta|\bfloat\b", annotation)
            if typed or NAMES.search(parameter.name):
                found.add(f"{owner}.{parameter.name}")
    return found - OTHERS


class Kept(elastic.State):
    """A state without contents."""


def job(path: Path, **options: Any) -> outlast.Job:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outlast.Job(path, model=model, optimizer=optimizer, signals=(), **options)


def on_checkpointer(call: Callable[[outlast.Checkpointer, Any], object]) -> Call:
    def calls(path: Path, value: Any) -> None:
        with outlast.Checkpointer(path) as checkpointer:
            call(checkpointer, value)

    return calls


def on_save_handle(wait: str) -> Call:
    return on_checkpointer(lambda one, value: getattr(one.save(1, {}), wait)(value))


def on_pending_save(wait: str) -> Call:
    return lambda path, value: getattr(elastic.PendingSave(), wait)(value)


def on_queue(path: Path, value: Any) -> None:
    queue = async_checkpoint.AsyncCallsQueue()
    try:
        queue.close(value)
    finally:
        queue.close()


def in_long_phase(path: Path, value: Any) -> None:
    @inprocess.Wrapper(store_factory=store.FileStore, store_kwargs={"file_name": str(path)})
    def train(call: inprocess.CallWrapper) -> Exception | None:
        try:
            with call.long_phase(value):
                return None
        except Exception as e:  # noqa: BLE001 - raised below, outside of the restarts
            return e

    error = train()
    if error is not None:
        raise error


def timeouts(name: str) -> Call:
    return lambda path, value: inprocess.Timeouts(**{name: value})


def wrapper(name: str) -> Call:
    return lambda path, value: inprocess.Wrapper(**{name: value})


CALLS: dict[str, Call] = {
    "Adaptive.floor": lambda path, value: inprocess.Adaptive(floor=value),
    "Adaptive.initial": lambda path, value: inprocess.Adaptive(initial=value),
    "AsyncCallsQueue.close.timeout": on_queue,
    "AwaitReplacements.timeout": lambda path, value: rank_assignment.AwaitReplacements(value),
    "CallWrapper.long_phase.limit": in_long_phase,
    "Checkpointer.close.timeout": on_checkpointer(lambda one, value: one.close(value)),
    "Checkpointer.linger": lambda path, value: outlast.Checkpointer(path, linger=value),
    "Checkpointer.timeout": lambda path, value: outlast.Checkpointer(path, timeout=value),
    "Checkpointer.wait.timeout": on_checkpointer(lambda one, value: one.wait(value)),
    "CudaHealthCheck.timeout": lambda path, value: health_check.CudaHealthCheck(value),
    "DeviceHealthCheck.timeout": lambda path, value: health_check.DeviceHealthCheck(value),
    "FilterGroupedByKey.timeout": lambda path, value: rank_assignment.FilterGroupedByKey(
        "host", bool, value
    ),
    "Job.every": lambda path, value: job(path, every=value),
    "Job.grace": lambda path, value: job(path, grace=value),
    "PlannedFault.after_seconds": lambda path, value: chaos.PlannedFault(
        rank=0, kind=chaos.Kind.EXCEPTION, after_seconds=value
    ),
    "PlannedFault.seconds": lambda path, value: chaos.PlannedFault(
        rank=0, kind=chaos.Kind.SLOW_DISK, seconds=value
    ),
    "RepeatedFaults.backoff": lambda path, value: inprocess.RepeatedFaults(backoff=value),
    "RepeatedFaults.crash_loop": lambda path, value: inprocess.RepeatedFaults(crash_loop=value),
    "RepeatedFaults.max_backoff": lambda path, value: inprocess.RepeatedFaults(max_backoff=value),
    "TCPStore.timeout": lambda path, value: store.TCPStore(timeout=value),
    "ThreadedFinalize.timeout": lambda path, value: finalize.ThreadedFinalize(value, print),
    "fail_at.after_seconds": lambda path, value: chaos.fail_at(0, after_seconds=value),
    "fail_at.seconds": lambda path, value: chaos.fail_at(0, kind="slow_disk", seconds=value),
    "fire.seconds": lambda path, value: chaos.fire("sigstop", seconds=value),
    "load_all_states.timeout": lambda path, value: elastic.load_all_states(timeout=value),
    "load_state.timeout": lambda path, value: elastic.load_state(Kept("kept"), timeout=value),
    "save_all_states.timeout": lambda path, value: elastic.save_all_states(timeout=value),
    "save_state.timeout": lambda path, value: elastic.save_state(Kept("kept"), None, timeout=value),
    **{f"PendingSave.{wait}.timeout": on_pending_save(wait) for wait in WAITS},
    **{f"SaveHandle.{wait}.timeout": on_save_handle(wait) for wait in WAITS},
    **{f"Timeouts.{name}": timeouts(name) for name in options_of(inprocess.Timeouts)},
    **{f"Wrapper.{name}": wrapper(name) for name in options_of(inprocess.Timeouts)},
}


def test_every_duration_is_known_here() -> None:
    assert sorted(durations() - CALLS.keys()) == []


@pytest.mark.parametrize("name", sorted(CALLS))
def test_anything_but_a_duration_is_refused(tmp_path: Path, name: str) -> None:
    argument = name.rpartition(".")[2]
    wrong: list[Any] = ["5", [5], True, float("nan"), float("inf"), -1]
    if name.endswith((".close.timeout", *(f".{wait}.timeout" for wait in WAITS))):
        wrong.pop()  # the time left until a deadline that has passed
    if name not in NONE_ALLOWED:
        wrong.append(None)
    if name == "Job.every":
        wrong += [1.5, 0, timedelta(0)]  # a number is one of steps
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"\b{argument} must "):
            CALLS[name](tmp_path / "there", value)


def test_the_options_of_a_store_are_checked_with_the_wrapper() -> None:
    with pytest.raises(TypeError, match=r"store_kwargs\['timeout'\] must be a number of seconds"):
        inprocess.Wrapper(store_kwargs={"timeout": "5"})
    with pytest.raises(TypeError, match=r"TCPStore\(\) has no option 'prot'; did you mean 'port'"):
        inprocess.Wrapper(store_kwargs={"prot": 5})
