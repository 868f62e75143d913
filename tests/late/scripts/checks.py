"""Checks on the device `late`: `python checks.py SCENARIO FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
from torch import nn

from late import device, scenario
from late.scenario import released_when_blocked, until
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic import FiniteCheck, ReplicaCheck, StragglerCheck
from outlast.elastic.silent_faults.finite_check import RunningFiniteCheck
from outlast.elastic.silent_faults.replica_check import RunningReplicaCheck
from outlast.elastic.silent_faults.straggler_check import RunningStragglerCheck
from outlast.elastic.tensors import Digests
from outlast.errors import NonFinite
from outlast.events.emitter import Emitter
from outlast.events.types import ReplicaMismatch

LATE = device.use()
SIZE = 512


def model(*devices: int | str) -> nn.ParameterList:
    """A parameter of zeros on each of these devices."""
    places = [f"late:{each}" if isinstance(each, int) else each for each in devices]
    return nn.ParameterList([nn.Parameter(torch.zeros(SIZE, device=each)) for each in places])


class Replicas:
    """The checks of two replicas, both in this process."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        self.found: list[ReplicaMismatch] = []
        check = ReplicaCheck(every=1, on_mismatch=self.found.append)
        store = MemoryStore()
        self.checks = [
            RunningReplicaCheck(check, each, CallLedger(store, "r", rank, 2), Emitter(None), 0)
            for rank, each in enumerate((first, second))
        ]

    def step(self) -> None:
        for check in self.checks:
            check.step()

    def equal(self) -> bool:
        """Whether they are found to be equal after the last step but one."""

        def known() -> bool:
            self.step()
            return bool(self.found) or all(check.known_clean_step for check in self.checks)

        until(known)
        for check in self.checks:
            check.close()
        return not self.found


def add(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in module.parameters():
            each.add_(value)


def digests_are_of_the_state_after_the_step() -> None:
    """Not of that before it, although the stream has not come to it, nor of a later one. A device
    that is not the current one stays so, and what is queued next is queued where it was.
    """
    LATE.set_delays(3, 20_000)  # an event that is not behind the digests comes long before them
    for number in (0, 1):
        late, other = model(number), model(1 - number)
        replicas = Replicas(late, other)
        before = torch.accelerator.current_stream(number)
        with device.held(number) as earlier:
            add(late, 1)
            add(other, 1)
            replicas.step()
            assert torch.accelerator.current_device_index() == 0
            assert torch.accelerator.current_stream(number) == before
            with device.held(number):  # the training goes on, and the digests do not wait for it
                LATE.settle()
                with released_when_blocked("digest", earlier):
                    assert replicas.equal(), replicas.found
        assert earlier.is_released()


def contents_are_noted_without_a_wait_and_found_again_wherever_they_are() -> None:
    late = model(0, "cpu", 0, 1)
    with device.held(0), device.held(1):
        add(late, 1)
        with torch.no_grad():
            late[2].add_(1)
        noted = Digests(list(late))
        LATE.settle()
    assert noted.same_as(list(late))
    for place in ("cpu", "late:0", "late:1"):
        assert noted.same_as([each.detach().to(place) for each in late]), place
    first, *others = late
    assert not noted.same_as(others)
    assert not noted.same_as([others[1], others[0], first, others[2]])
    for each in late:
        each.data[3] += 1
        assert not noted.same_as(list(late))
        each.data[3] -= 1
    assert noted.same_as(list(late))


def an_optimizer_waits_for_digests() -> None:
    late, other = model(0), model(1)
    optimizer = torch.optim.SGD(late.parameters(), lr=1.0)
    replicas = Replicas(late, other)
    with device.held_beside(0):
        replicas.step()
        LATE.settle()  # the digests of `other` are made: nothing below waits for them
        for each in late.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        add(other, -1)
        LATE.settle()
    assert replicas.equal(), replicas.found


def parameters_on_several_devices_are_compared() -> None:
    for places in ((0, 1), ("cpu", 1), (1, "cpu")):
        late, other = model(*places), model(*places)
        replicas = Replicas(late, other)
        for value in (1, 2):
            with device.held(1) as gate:
                add(late, value)
                add(other, value)
                LATE.settle()
                replicas.step()
                LATE.settle()
                gate.release()
        assert replicas.equal(), (places, replicas.found)
        replicas = Replicas(late, other)
        with torch.no_grad():
            late[1].view(-1)[3] += 1
        assert not replicas.equal(), places
        assert replicas.found[0].parameters == ["1"], (places, replicas.found)


def a_parameter_whose_memory_is_replaced() -> None:
    """By `parameter.data = ...`, which torch does not count: its memory must last longer."""
    late, other = model(0), model(1)
    replicas = Replicas(late, other)
    with device.held_beside(0):
        replicas.step()
        late[0].data = torch.zeros(SIZE, device="late:0")
        new = [torch.full((SIZE,), 7.0, device="late:0") for _ in range(3)]
        LATE.settle()
    assert replicas.equal(), replicas.found
    del new


def finite(module: nn.Module) -> RunningFiniteCheck:
    parameters = dict(module.named_parameters())
    ledger = CallLedger(MemoryStore(), "f", 0, 1)
    return RunningFiniteCheck(FiniteCheck(every=1), parameters, ledger, Emitter(None), 0)


def parameters_that_are_not_finite_are_found_without_a_wait() -> None:
    for places in ((0,), (0, 1), (1, 0)):
        late = model(*places)
        with finite(late) as check:
            with device.held(places[-1]):
                add(late, torch.nan)
                check.step(1)
                add(late, torch.nan)
                check.step(2)
                LATE.settle()
                check.step(3)
            torch.accelerator.synchronize(0)
            torch.accelerator.synchronize(1)
            with pytest.raises(NonFinite, match="after step 1"):
                check.step(4)


def a_loss_is_read_without_a_wait() -> None:
    late = model(0)
    with finite(late) as check:
        loss = torch.zeros((), device="late:0")
        with device.held(0):
            for step in range(1, 4):  # one tensor for all steps, as with a graph of kernels
                loss.fill_(torch.inf if step == 2 else 0.0)
                check.step(step, loss)
        torch.accelerator.synchronize(0)
        with pytest.raises(NonFinite, match=r"after step 2: .*the loss of rank 0"):
            check.step(4, loss)


def the_losses_of_the_last_steps_are_read_at_the_end() -> None:
    late = model(0)
    with finite(late) as check:
        loss = torch.zeros((), device="late:0")
        with device.held(0) as gate, released_when_blocked("check_all", gate):
            check.step(1, loss.fill_(torch.inf))
            with pytest.raises(NonFinite, match=r"after step 1: .*the loss of rank 0"):
                check.check_all()


def times_of_a_device_are_read_when_they_are_there() -> None:
    for places in ((0,), (1,), (0, 1), (1, 0)):
        checks_its_times(model(*places), model(*places))


def checks_its_times(*replicas: nn.ParameterList) -> None:
    store, options = MemoryStore(), StragglerCheck(window=6)
    checks = [
        RunningStragglerCheck(options, each, CallLedger(store, "s", rank, 2), Emitter(None), 0)
        for rank, each in enumerate(replicas)
    ]
    with device.held(replicas[0][0].device.index) as gate:
        for step in range(1, 7):
            for module in replicas:
                sum(p.square().sum().to("late:0") for p in module).backward()
                module.zero_grad()
            with released_when_blocked("_seconds", gate):
                for check in checks:
                    check.step(step)
                if step == 6:
                    until(lambda: gate.is_released() or any(c._exchange.error for c in checks))
    for check in checks:
        check._exchange.all_results(30)
        assert check._exchange.error is None
        check.close()


scenario.run(globals())
