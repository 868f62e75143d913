"""A rank offers the state of its last step only if it is still that of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from outlast.elastic.job.live.point import Place
from outlast.elastic.job.live.recorder import Recorder
from outlast.elastic.job.live.slots import read
from outlast.elastic.job.training_state import TrainingState
from outlast.system.shared_memory import SharedMemory

BRANCH = "000000001-a"


class Model(nn.Module):
    book: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("book", torch.ones(20_000))  # too large to be noted every time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.layer(x))
        return y


class Kept:
    """In place of the process that keeps the memory after a kill."""

    memory: SharedMemory

    def keep(self, memory: SharedMemory) -> None:
        if hasattr(self, "memory"):
            self.memory.close()
        self.memory = memory


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        state = TrainingState(
            self.model, self.optimizer, None, {}, rank=0, world_size=1, random=True
        )
        self.steps = 0
        kept: Any = Kept()
        self.kept = kept
        self.recorder = Recorder(
            state, kept, Place(BRANCH, 0, 0, 1), BRANCH, random=True, counters={"steps": 0}
        )

    def backward(self) -> None:
        self.model(torch.randn(4, 8)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.completed()

    def completed(self) -> None:
        self.steps += 1
        self.recorder.completed(self.steps, {"steps": self.steps})

    def offered(self) -> int | None:
        """The step whose state is offered after a fault now."""
        self.recorder.freeze()
        return None if self.recorder.frozen is None else self.recorder.frozen.place.step


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.recorder.release()
    made.kept.memory.close()


def swap_contents(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.copy_(parameter.data * 0.9)


def swap_memory(training: Training) -> None:
    parameter = training.model.layer.weight
    parameter.data = parameter.data.clone()


def write(training: Training) -> None:
    with torch.no_grad():
        training.model.layer.bias[0] += 1


def scale_moments(training: Training) -> None:
    for moments in training.optimizer.state.values():
        moments["exp_avg"].mul_(0.5)


def load_moments(training: Training) -> None:
    state = training.optimizer.state_dict()
    moments = {n: {k: v.clone() for k, v in m.items()} for n, m in state["state"].items()}
    training.optimizer.load_state_dict({**state, "state": moments})


def clear_moments(training: Training) -> None:
    training.optimizer.state.clear()


def interrupted_step(training: Training) -> None:
    def closure() -> float:
        raise RuntimeError("a fault in the optimizer's step")

    with pytest.raises(RuntimeError):
        training.optimizer.step(closure)


@pytest.mark.parametrize(
    "change",
    [
        swap_contents,
        swap_memory,
        write,
        scale_moments,
        load_moments,
        clear_moments,
        interrupted_step,
    ],
)
def test_a_changed_state_is_not_offered(
    training: Training, change: Callable[[Training], None]
) -> None:
    training.step()
    change(training)
    assert training.offered() is None


@pytest.mark.parametrize("swap", [swap_contents, swap_memory])
def test_changes_before_the_end_of_the_step_belong_to_it(
    training: Training, swap: Callable[[Training], None]
) -> None:
    training.step()
    swap(training)
    training.step()
    training.backward()
    assert training.offered() == 2


def test_the_state_restored_is_offered_before_the_first_step(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.detach().copy_(parameter.detach().clone())  # counted; DDP does so
    assert training.offered() == 0


def test_gradients_that_are_needed_later_belong_to_no_offered_state(training: Training) -> None:
    training.step()
    for _ in range(3):
        training.backward()
        training.completed()
    assert training.offered() is None


def test_a_state_is_offered_again_once_the_gradients_were_used(training: Training) -> None:
    training.backward()
    training.completed()
    training.step()
    assert training.offered() == 2


def test_a_step_without_gradients_and_without_the_optimizer_is_offered(training: Training) -> None:
    training.step()
    training.completed()
    assert training.offered() == 2


def test_large_buffers_are_noted_when_their_contents_change(training: Training) -> None:
    training.step()
    noted = training.recorder._point.own["buffers"]
    training.model.book.mul_(1)  # counted, but the same
    training.step()
    assert "book" not in {**noted, **training.recorder._point.own["buffers"]}
    training.model.book.data[12_345] += 1  # not counted
    training.step()
    assert "book" in training.recorder._point.own["buffers"]


def test_a_state_that_has_grown_is_kept_with_those_before(training: Training) -> None:
    training.step()
    training.step()
    training.model.book += 1  # until now it was not noted
    training.step()
    kept = [record.step for record, _ in read(training.kept.memory) if record.final]
    assert kept[:2] == [3, 2]
