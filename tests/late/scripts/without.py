"""A device that lacks an optional hook: `python without.py SCENARIO FOLDER`. All that a job does on
a device goes on, with one line in the log.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from late import device, scenario
from late.scenario import released_when_blocked, until
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot.device_copy import DeviceChunks
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic import FiniteCheck, ReplicaCheck, StragglerCheck
from outlast.elastic import random_generators as generators
from outlast.elastic.silent_faults.digests import SideStreams
from outlast.elastic.silent_faults.finite_check import RunningFiniteCheck
from outlast.elastic.silent_faults.layout import Layout
from outlast.elastic.silent_faults.replica_check import RunningReplicaCheck
from outlast.elastic.silent_faults.straggler_check import RunningStragglerCheck
from outlast.events.emitter import Emitter
from outlast.inprocess.health_check import check_device_context
from outlast.system.streams import has_times

LINES: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def train(hook: str, *said: str) -> None:
    os.environ[device.WITHOUT] = hook
    logging.getLogger("outlast").addHandler(Lines(logging.WARNING))
    late = device.use()
    late.set_delays(13, 2000)
    saves(f"{sys.argv[2]}/checkpoints")
    is_checked()
    generators.set_all(generators.capture())
    check_device_context(0)
    assert len(LINES) == len(said), LINES
    for line, text in zip(LINES, said, strict=True):
        assert line.startswith(f"the device type late has no {text}: "), LINES


def saves(path: str) -> None:
    weight = nn.Parameter(torch.zeros(4096, device="late"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with Checkpointer(path, overlap=optimizer) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                weight.add_(1)
            checkpointer.save(step, {"w": weight})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            with torch.no_grad():
                weight.fill_(step)
        checkpointer.wait()
        for step in (1, 2):
            found = {"w": torch.full((4096,), 9.0)}
            checkpointer.restore(found, step=step)
            assert torch.equal(found["w"], torch.full((4096,), float(step))), step


def finite_check(model: nn.Module) -> RunningFiniteCheck:
    parameters, ledger = dict(model.named_parameters()), CallLedger(MemoryStore(), "f", 0, 1)
    return RunningFiniteCheck(FiniteCheck(every=1), parameters, ledger, Emitter(None), 0)


def is_checked(steps: int = 6) -> None:
    """With a rank that is a replica of this one, in the same process."""
    model, store = nn.Linear(64, 8).to("late"), MemoryStore()
    finite = finite_check(model)
    ledgers = [[CallLedger(store, kind, rank, 2) for rank in range(2)] for kind in "rs"]
    replicas = [
        RunningReplicaCheck(ReplicaCheck(every=1), model, each, Emitter(None), 0)
        for each in ledgers[0]
    ]
    stragglers = [
        RunningStragglerCheck(StragglerCheck(window=steps), model, each, Emitter(None), 0)
        for each in ledgers[1]
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        loss = model(torch.ones(2, 64).to("late")).sum()
        loss.backward()
        optimizer.step()
        finite.step(step, loss)
        for check in (*replicas, *stragglers):
            check.step(step)
    for each in stragglers:
        each._exchange.all_results(30)

    def known() -> bool:
        for check in replicas:
            check.step()
        return all(check.known_clean_step for check in replicas)

    until(known)
    for check in (*replicas, *stragglers):
        assert check._exchange.error is None
        check.close()
    finite.check_all()
    finite.close()


def without_memory_figures() -> None:
    train("figures")


def without_page_locked_memory() -> None:
    train("pinned memory", "allocator of page-locked memory")


def without_streams_of_its_own() -> None:
    train("streams", "streams beside the default one")


def without_events() -> None:
    """The host waits wherever a stream would."""
    train("events", "events", "times of events")
    weight, target = nn.Parameter(torch.zeros(4096, device="late")), torch.full((4096,), 9.0)
    with device.held() as gate, torch.no_grad(), released_when_blocked("make_wait", gate):
        DeviceChunks([(weight.add_(1), target)]).fill(0)
        assert gate.is_released()
    assert torch.equal(target, torch.ones(4096))
    layout = Layout.of(nn.ParameterList([weight]), 1)
    with device.held() as gate, torch.no_grad(), released_when_blocked("make_follow", gate):
        weight.add_(1)
        SideStreams([weight.device]).start(layout.slices[0], layout.parameters)
        assert gate.is_released()
    finite = finite_check(nn.ParameterList([weight]))
    with device.held() as gate, released_when_blocked("query", gate):
        finite.step(1)
        assert gate.is_released()


def without_times_of_events() -> None:
    train("times", "times of events")


def times_of_events_are_tried_when_the_device_is_busy() -> None:
    device.use()
    with device.held() as gate, released_when_blocked("probe", gate):
        assert has_times(torch.device("late", 0))
        assert gate.is_released()


def without_queries_of_streams() -> None:
    train("queries", "queries of streams")


def without_generators() -> None:
    train("generators", "random generators")


scenario.run(globals())
