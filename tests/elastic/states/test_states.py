"""The ready-made states: they load what they saved, and a mismatch changes nothing."""

from __future__ import annotations

import collections
import copy
import datetime
import io
import json
import random
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies as st

from elastic.text_state import Text
from outlast.elastic import (
    CounterState,
    EMAState,
    ModuleState,
    OptimizerState,
    RandomState,
    ScalerState,
    SchedulerState,
    ShardedState,
    State,
    StateDictState,
    load_all_states,
    load_state,
    save_all_states,
    save_state,
)
from outlast.elastic.states.gathered import _share
from outlast.errors import CheckpointError


def saved(state: State) -> io.BytesIO:
    file = io.BytesIO()
    state.save(file)
    file.seek(0)
    return file


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Training:
    """All objects of a training run."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5]),
            ],
            milestones=[2],
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.counters = CounterState()
        self.states = [
            ModuleState(self.model),
            OptimizerState(self.optimizer),
            SchedulerState(self.scheduler),
            ScalerState(self.scaler),
            EMAState(self.ema),
            RandomState(),
            self.counters,
        ]

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 3)).square().mean() * (1 + random.random())
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.counters.step += 1
        return float(loss.detach())

    def everything(self) -> list[Any]:
        parts = (self.model, self.optimizer, self.scheduler, self.scaler, self.ema)
        return [copy.deepcopy(part.state_dict()) for part in parts]


# A `SequentialLR` of torch 2.6 calls its schedulers in this way.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_training_goes_on_as_if_it_had_not_ended(folder: Path) -> None:
    training = Training(0)
    for _ in range(4):
        training.step()
    save_all_states()
    losses = [training.step() for _ in range(4)]
    everything = training.everything()
    training.states.clear()
    del training

    training = Training(1)
    assert len(load_all_states()) == 7
    assert training.counters.step == 4
    assert [training.step() for _ in range(4)] == losses
    assert equal(training.everything(), everything)


def test_nothing_is_loaded_if_one_state_does_not_fit(folder: Path) -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    states: list[State] = [ModuleState(model, "a"), ModuleState(other, "b")]
    save_all_states()
    states.clear()
    states = [ModuleState(model, "a"), ModuleState(torch.nn.Linear(3, 5), "b")]
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(
        CheckpointError, match=r"state 'b' could not be loaded: ValueError: .*bias is \(5,\)"
    ):
        load_all_states()
    assert not model.weight.any()


def test_a_module_that_lacks_keys_is_left_as_it_was() -> None:
    file = saved(ModuleState(torch.nn.Linear(3, 4), "a"))
    model = torch.nn.Linear(3, 4, bias=False)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="only in the saved state: bias"):
        ModuleState(model, "b").load(file)
    assert torch.equal(model.weight, before)


def test_wrapping_a_module_changes_nothing_of_what_is_saved() -> None:
    model = torch.nn.Linear(3, 4)
    compiled = torch.compile(model, backend="eager")
    for wrapped in (torch.nn.DataParallel(model), compiled):
        file = saved(ModuleState(wrapped, "a"))
        other = torch.nn.Linear(3, 4)
        ModuleState(other, "b").load(file)
        assert torch.equal(model.weight, other.weight)


def test_an_optimizer_with_other_groups() -> None:
    model = torch.nn.Linear(3, 4)
    file = saved(OptimizerState(torch.optim.Adam(model.parameters()), "a"))
    optimizer = torch.optim.Adam([model.weight])
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, groups of \[2\] were saved"):
        OptimizerState(optimizer, "b").load(file)


class Source:
    """Loads half, and then raises."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in state:
            self.state[key] = state[key]
            if self.broken:
                self.broken = False
                raise RuntimeError("in the middle")


def test_what_was_there_comes_back_if_a_load_fails() -> None:
    file = saved(StateDictState(Source(a=1, b=2), "a"))
    source = Source(a=3, b=4)
    source.broken = True
    with pytest.raises(RuntimeError, match="in the middle"):
        StateDictState(source, "b").load(file)
    assert source.state == {"a": 3, "b": 4}


def test_what_could_not_be_loaded_is_not_saved() -> None:
    state = StateDictState(Source(when=[lambda: 1], tensor=torch.ones(2)), "a")
    with pytest.raises(
        ValueError, match=r"state \(when\[0\]\) cannot be saved: a lambda could not"
    ):
        saved(state)


def test_what_is_no_tensor_comes_back() -> None:
    source = Source(
        when=datetime.timedelta(1), best=numpy.float32(0.5), last=collections.deque([1])
    )
    file = saved(StateDictState(source, "a"))
    other = Source()
    StateDictState(other, "b").load(file)
    assert other.state == source.state
    assert type(other.state["best"]) is numpy.float32


def test_a_state_of_another_kind() -> None:
    file = saved(StateDictState(Source(a=1), "a"))
    with pytest.raises(ValueError, match="'state_dict' was saved, this is 'module'"):
        ModuleState(torch.nn.Linear(1, 1)).load(file)
    file = io.BytesIO()
    torch.save([1], file)
    file.seek(0)
    with pytest.raises(ValueError, match="saved by another class of state"):
        ModuleState(torch.nn.Linear(1, 1), "b").load(file)


def test_a_later_format_of_a_state() -> None:
    file = io.BytesIO()
    torch.save({"format": 99, "kind": "module", "value": {}}, file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"format 99, .*update outlast"):
        ModuleState(torch.nn.Linear(1, 1)).load(file)


def test_what_has_no_state_dict() -> None:
    with pytest.raises(ValueError, match="'a': object has no state_dict and no load_state_dict"):
        StateDictState(object(), "a")


@hypothesis.given(*[st.integers(0, 1 << 62)] * 3)
def test_counters(step: int, epoch: int, samples: int) -> None:
    counters = CounterState("a")
    counters.step, counters.epoch, counters.samples = step, epoch, samples
    before = counters.seconds
    other = CounterState("b")
    other.load(saved(counters))
    assert (other.step, other.epoch, other.samples) == (step, epoch, samples)
    assert other.seconds >= before


def test_broken_counters_change_nothing() -> None:
    counters = CounterState()
    with pytest.raises(KeyError):
        counters.load(io.BytesIO(json.dumps({"step": 5, "epoch": 1}).encode()))
    assert counters.step == 0


# ---------------------------------------------------------------------------- random generators


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.standard_normal()),
        torch.rand(3).tolist(),
    ]


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_generators_go_on(folder: Path, drawn_before: int) -> None:
    state = RandomState()
    for _ in range(drawn_before):  # normal numbers come in pairs; the second is kept for later
        draws()
    save_all_states()
    first = [draws() for _ in range(3)]
    assert load_state(state)
    assert [draws() for _ in range(3)] == first
    save_state(state, folder / "mine", sync=False)


def test_a_damaged_generator_changes_none() -> None:
    state = RandomState("a")
    generators = torch.load(saved(state), weights_only=True)
    generators["value"][0]["python"] = generators["value"][0]["python"][:5]
    file = io.BytesIO()
    torch.save(generators, file)
    file.seek(0)
    before = random.getstate()
    with pytest.raises(ValueError, match="state"):
        state.load(file)
    assert random.getstate() == before


@hypothesis.given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 8))
def test_generators_for_any_number_of_replicas(states: list[int], size: int) -> None:
    generators = [{"torch": torch.tensor([number])} for number in states]
    shares = [_share(generators, rank, size)["torch"] for rank in range(size)]
    again = [_share(generators, rank, size)["torch"] for rank in range(size)]
    assert equal(shares, again)
    if len(states) == size:
        assert equal(shares, [g["torch"] for g in generators])
    elif len(states) > 1 and len(set(states)) == 1:
        assert all(equal(share, generators[0]["torch"]) for share in shares)
    else:
        kept = min(len(states), size)
        assert equal(shares[:kept], [g["torch"] for g in generators[:kept]])
        new = shares[kept:]
        assert all(isinstance(share, int) for share in new)
        assert len(set(new)) == len(new)


# ------------------------------------------------------------------------------------- sharded


def test_a_sharded_state_in_one_process(folder: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    state = ShardedState(model, optimizer)
    save_all_states()  # the optimizer has made no step
    assert load_state(state)
    assert not optimizer.state
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_all_states()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    optimizer.step()
    assert load_state(state)
    assert equal([model.state_dict(), optimizer.state_dict()], before)
    with pytest.raises(CheckpointError, match="save it with sync=True"):
        save_state(state, folder / "mine", sync=False)


def test_states_of_any_class_go_together(folder: Path) -> None:
    states = [Text("text", "1"), CounterState()]
    save_all_states()
    assert load_all_states() == ["counters", "text"]
    assert len(states) == 2
