"""`Job` in one process: what `restore` loads, and what it rolls back when it fails."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from outlast.elastic import Job
from outlast.elastic.job import encoding
from outlast.errors import CheckpointError, CheckpointMismatch

Made = Callable[..., Job]


class InPlace(torch.optim.Adam):
    """An optimizer that loads into its current tensors."""

    refuses = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = copy.copy(self.state)
        super().load_state_dict(state_dict)
        for parameter, moments in before.items():
            for name, value in moments.items():
                loaded = self.state[parameter].get(name)
                if loaded is not None:
                    self.state[parameter][name] = value.copy_(loaded)
        if self.refuses:
            self.refuses = False
            raise RuntimeError("no more")


class Refusing:
    """A state that can be set to refuse loading."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and not torch.equal(state["tensor"], torch.full((2,), 7.0)):
            raise RuntimeError("not this one")
        self.tensor.copy_(state["tensor"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    jobs: list[Job] = []

    def made(optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Job:
        torch.manual_seed(len(jobs))
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        given = {"lr": 0.1, **options}
        job = Job(
            tmp_path / f"checkpoints{len(jobs) // 2}",
            model=module,
            optimizer=optimizer(module.parameters(), **given),
            states={"kept": Refusing()},
            every=None,
            signals=(),
        )
        jobs.append(job)
        return job

    yield made
    for job in jobs:
        job.close()


def train(job: Job, steps: int = 1) -> None:
    for _ in range(steps):
        job.optimizer.zero_grad()
        job.model(torch.randn(2, 3, 5, 5)).square().sum().backward()
        job.optimizer.step()
        job.step(samples=2)


def copy_of(job: Job) -> dict[str, Any]:
    """Copies of all state of a job."""
    moments = [
        {name: value.clone() for name, value in each.items()}
        for each in job.optimizer.state.values()
    ]
    return {
        "weights": [p.detach().clone() for p in job.module.parameters()],
        "moments": [value for each in moments for value in each.values()],
        "rate": job.optimizer.param_groups[0]["lr"],
        "kept": job.states["kept"].tensor.clone(),
        "counters": (job.steps, job.samples),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist()),
        "torch": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_new_job_loads_nothing_into_itself(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made()
    loads: list[object] = []
    for part in job._training.parts.values():
        monkeypatch.setattr(part, "load", lambda *given: loads.append(given))
    assert job.restore() == 0
    assert not loads
    assert [each.step for each in job.checkpointer.checkpoints()] == [0]


def test_a_survivor_goes_back_to_the_checkpoint(made: Made) -> None:
    job = made()
    job.restore()
    train(job, 2)
    random.gauss(0, 1)  # the generator keeps the second of the pair
    job.save().wait()
    saved = copy_of(job)
    train(job, 3)
    job.optimizer.param_groups[0]["lr"] = 0.5
    job.states["kept"].tensor.fill_(3)
    random.random()
    numpy.random.rand()
    assert not same(copy_of(job), saved)
    assert job.restore() == 2
    assert same(copy_of(job), saved)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, InPlace])
def test_a_survivor_is_unchanged_if_a_state_refuses_to_load(
    made: Made, optimizer: type[torch.optim.Optimizer]
) -> None:
    job = made(optimizer)
    job.restore()
    train(job, 2)
    job.save().wait()
    train(job, 3)
    kept = job.states["kept"]
    kept.tensor.fill_(7)
    kept.refuses = True
    before = copy_of(job)
    with pytest.raises(CheckpointError, match="the state 'kept' could not be loaded"):
        job.restore()
    assert same(copy_of(job), before)
    train(job)
    assert job.steps == 6


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, InPlace])
def test_a_survivor_is_unchanged_if_the_optimizer_refuses_to_load(
    made: Made, optimizer: type[torch.optim.Optimizer]
) -> None:
    job = made(optimizer)
    job.restore()
    train(job, 2)
    job.save().wait()
    train(job, 3)
    before = copy_of(job)

    def refuses(_: Any) -> None:
        hook.remove()
        raise RuntimeError("no more")

    if isinstance(job.optimizer, InPlace):
        job.optimizer.refuses = True
    else:
        hook = job.optimizer.register_load_state_dict_post_hook(refuses)
    with pytest.raises(RuntimeError, match="no more"):
        job.restore()
    assert same(copy_of(job), before)


def test_a_survivor_goes_back_to_the_initial_state(made: Made) -> None:
    job = made()
    job.restore()
    beginning = copy_of(job)
    train(job, 2)
    assert job.restore() == 0
    assert not job.optimizer.state
    assert same(copy_of(job), beginning)


def test_moments_have_the_memory_format_of_their_parameters(made: Made) -> None:
    """A fused optimizer pairs parameters and moments by address."""
    one = made(fused=True)
    one.restore()
    train(one, 2)
    one.save().wait()
    one.checkpointer.close()  # releases the folder for the next job
    other = made(fused=True)
    assert other.restore() == 2
    for job in (one, other):
        torch.manual_seed(5)
        for p in job.module.parameters():
            for value in job.optimizer.state[p].values():
                assert value.dim() == 0 or value.stride() == p.stride()
        job.optimizer.zero_grad()
        job.model(torch.randn(2, 3, 5, 5)).square().sum().backward()
        job.optimizer.step()
    assert same(list(one.module.parameters()), list(other.module.parameters()))


class Settable:
    """A state that a test sets."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "refuse" in self.state:
            del self.state["refuse"]
            raise RuntimeError("no more")
        self.state = state


SMALL: list[dict[str, Any]] = [
    {},
    {"best": 1.5, "history": []},
    {"history": [1, 2], "seen": Counter("aab"), "inner": {"empty": {}, 3: (None, b"x")}},
    {"history": [1], "flag": True},
]
WITH_TENSORS: list[dict[str, Any]] = [
    {"shadow": torch.ones(3), "count": 2},
    {"shadow": torch.zeros(3), "count": 3, "more": torch.ones(2), "extra": {}},
    {"history": [torch.ones(1), torch.ones(2)], "best": None, "inner": OrderedDict(b=1, a={})},
    {"history": [torch.ones(1)] * 3, "best": torch.ones(1), "pair": (torch.ones(1), 2)},
]


def job_with(path: Path, state: Settable) -> Job:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    states = {"attached": state}
    return Job(path, model=module, optimizer=optimizer, states=states, every=None, signals=())


@contextlib.contextmanager
def saved_with(path: Path, attached: Settable) -> Iterator[Job]:
    """A job that has saved once, after a step."""
    with job_with(path, attached) as job:
        job.restore()
        job.step()
        job.save().wait()
        yield job


@pytest.mark.slow
@pytest.mark.parametrize("saved", [*SMALL, *WITH_TENSORS], ids=range(8))
def test_an_attached_state_is_restored_exactly(tmp_path: Path, saved: dict[str, Any]) -> None:
    """Whatever its current keys, in the process that saved it and in a new one."""

    def restores(job: Job) -> None:
        for now in (*SMALL, *WITH_TENSORS):
            attached.state = copy.deepcopy(now)
            assert job.restore() == 1
            assert str(attached.state) == str(saved), f"it was {now}"

    attached = Settable(copy.deepcopy(saved))
    with saved_with(tmp_path, attached) as job:
        restores(job)
    attached = Settable({"begun": torch.ones(1)})
    with job_with(tmp_path, attached) as job:
        restores(job)


def test_an_attached_state_that_is_loaded_in_place_is_restored_exactly() -> None:
    """On a GPU, or sharded: current keys that were not saved are dropped."""
    saved = encoding.pack({"a": torch.ones(1), "h": [torch.ones(1)], "n": 1})
    target = {"a": torch.ones(1), "h": [torch.ones(1), torch.ones(2)], "n": 2, "new": torch.ones(1)}
    found = encoding.unpack({**target, "(skeleton)": saved["(skeleton)"]})
    assert str(found) == str({"a": torch.ones(1), "h": [torch.ones(1)], "n": 1})
    with pytest.raises(CheckpointError, match=r"'h\.0' was saved, but the current state has no"):
        encoding.unpack({"a": torch.ones(1), "h": [], "(skeleton)": saved["(skeleton)"]})


@pytest.mark.parametrize("now", SMALL[1:], ids=str)
def test_an_attached_state_that_refuses_to_load_is_rolled_back(
    tmp_path: Path, now: dict[str, Any]
) -> None:
    attached = Settable({"best": 2})
    with saved_with(tmp_path, attached) as job:
        attached.state = {**copy.deepcopy(now), "refuse": True}
        with pytest.raises(CheckpointError, match="'attached' could not be loaded: no more"):
            job.restore()
        assert str(attached.state) == str({**now, "refuse": True})


def test_a_torch_scheduler(tmp_path: Path) -> None:
    def scheduled() -> tuple[Job, torch.optim.lr_scheduler.MultiStepLR]:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        states = {"scheduler": scheduler}
        options: dict[str, Any] = {"every": None, "signals": ()}
        return Job(tmp_path, model=module, optimizer=optimizer, states=states, **options), scheduler

    job, scheduler = scheduled()
    with job:
        job.restore()
        for _ in range(3):
            job.optimizer.step()
            scheduler.step()
        job.step()
        job.save().wait()
    job, restored = scheduled()
    with job:
        assert job.restore() == 1
        assert restored.state_dict() == scheduler.state_dict()
        assert type(restored.milestones) is Counter


class Expanded:
    """A state whose elements share memory; it may refuse to load."""

    def __init__(self, value: float) -> None:
        self.tensor, self.refuses = torch.full((1, 2), value).expand(4, 2), False

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            self.tensor[0].fill_(9)
            raise RuntimeError("not this one")
        self.tensor = state["tensor"]


def test_an_expanded_tensor_is_saved_loaded_and_rolled_back(tmp_path: Path) -> None:
    module, state = nn.Linear(1, 1), Expanded(3)
    optimizer = torch.optim.SGD(module.parameters())
    with Job(tmp_path, model=module, optimizer=optimizer, states={"e": state}, signals=()) as job:
        assert job.restore() == 0
        state.tensor = Expanded(5).tensor
        state.refuses = True
        with pytest.raises(CheckpointError, match="not this one"):
            job.restore()
        assert torch.equal(state.tensor, torch.full((4, 2), 5.0))
        assert job.restore() == 0
        assert torch.equal(state.tensor, torch.full((4, 2), 3.0))


@pytest.mark.parametrize("name", ["steps", "samples", "seconds"])
def test_a_forged_counter_is_named(made: Made, name: str) -> None:
    job = made()
    job.restore()
    before = copy_of(job)
    counters = {**job._training.counters.save(), name: "many"}
    job.checkpointer.save(5, {**job._training.state_dict(), "counters": counters}).wait()
    with pytest.raises(CheckpointMismatch, match=f"'counters.{name}' of the state is 'many', and"):
        job.restore()
    assert same(copy_of(job), before)
