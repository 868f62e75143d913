"""A rank offers the state of its last step only if it is still that of the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from outlast.elastic.job.live.own_state import Record, read
from outlast.elastic.job.live.recorder import Recorder
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
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.state = TrainingState(self.model, self.optimizer, None, {}, 0, 1, random=True)
        kept: Any = Kept()
        self.kept = kept
        self.recorder = self.record()

    @property
    def steps(self) -> int:
        return self.state.counters.steps

    def record(self) -> Recorder:
        """As after a restore."""
        restored = Record(BRANCH, self.steps, True, 0, 1)
        return Recorder(self.state, self.kept.keep, restored, BRANCH, lambda: None)

    def backward(self) -> None:
        self.model(torch.randn(4, 8)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.completed()

    def completed(self) -> None:
        self.state.counters.steps += 1
        self.recorder.completed()

    def offered(self) -> int | None:
        """The step whose state is offered after a fault now."""
        self.recorder.freeze()
        frozen = self.recorder.all_frozen
        return frozen[-1].held.record.step if frozen else None


@contextlib.contextmanager
def made(*arguments: Any) -> Iterator[Training]:
    found = Training(*arguments)
    yield found
    found.recorder.release()
    found.kept.memory.close()


@pytest.fixture
def training() -> Iterator[Training]:
    with made() as found:
        yield found


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
    hook = training.optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError):
        training.optimizer.step()
    hook.remove()


def fail(*_: Any) -> None:
    raise RuntimeError("a fault")


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


@pytest.mark.parametrize("by_name", [False, True])
def test_a_fault_in_a_closure_before_the_first_write_costs_no_step(
    training: Training, by_name: bool
) -> None:
    training.step()

    def closure() -> float:
        training.backward()
        raise RuntimeError("a fault in the forward or backward pass")

    with pytest.raises(RuntimeError):
        training.optimizer.step(**{"closure": closure}) if by_name else training.optimizer.step(
            closure
        )
    assert training.offered() == 1


def test_a_fault_after_the_closure_belongs_to_the_step(training: Training) -> None:
    training.step()

    def closure() -> float:
        training.backward()
        return 0.0

    hook = training.optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError):
        training.optimizer.step(closure)
    hook.remove()
    assert training.offered() is None
    assert training.recorder.why == "the optimizer had begun step 2, which was not completed"


class WritesFirst(torch.optim.SGD):
    """Changes the parameters before it calls the closure, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1.01)
        return closure()


@pytest.mark.parametrize(
    ("kind", "evaluation", "offered"),
    [(torch.optim.LBFGS, 1, 1), (torch.optim.LBFGS, 2, None), (WritesFirst, 1, None)],
)
def test_a_step_begins_with_the_first_write_of_its_optimizer(
    kind: Callable[..., torch.optim.Optimizer], evaluation: int, offered: int | None
) -> None:
    """The fault is in the given evaluation of the closure in the second step."""
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if training.steps == 1 and calls == evaluation:
            raise RuntimeError("a fault")
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.model(torch.ones(4, 8)).sub(1).square().sum()
        loss.backward()
        return loss

    with made(kind) as training:
        training.optimizer.step(closure)
        training.completed()
        calls = 0
        with pytest.raises(RuntimeError):
            training.optimizer.step(closure)
        assert training.offered() == offered


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


def test_tensors_that_are_moved_after_a_restore_are_compared(training: Training) -> None:
    training.step()
    training.recorder.release()
    training.recorder = training.record()
    load_moments(training)  # accelerate does so when it prepares an optimizer
    swap_memory(training)  # and a model
    assert training.offered() == 1


@pytest.mark.parametrize("change", [scale_moments, swap_contents])
def test_other_contents_after_a_restore_are_noticed(
    training: Training, change: Callable[[Training], None]
) -> None:
    training.step()
    training.recorder.release()
    training.recorder = training.record()
    change(training)
    assert training.offered() is None


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
    noted = training.recorder.point.own["buffers"]
    training.model.book.mul_(1)  # counted, but the same
    training.step()
    assert "book" not in {**noted, **training.recorder.point.own["buffers"]}
    training.model.book.data[12_345] += 1  # not counted
    training.step()
    assert "book" in training.recorder.point.own["buffers"]


def test_a_state_that_has_grown_is_kept_with_those_before(training: Training) -> None:
    training.step()
    training.step()
    training.model.book += 1  # until now it was not noted
    training.step()
    kept = [record.step for record, _ in read(training.kept.memory) if record.final]
    assert kept[:2] == [3, 2]


def phases(training: Training) -> list[tuple[int, int]]:
    """The phases of the last step that are offered: the first and the last one of each state."""
    training.recorder.freeze()
    found = training.recorder.all_frozen
    return [(each.held.record.phase, each.held.record.until) for each in found]


def draw(_: Training) -> None:
    torch.rand(1)


def count(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("rest", "offered"),
    [
        (lambda _: None, [(0, 2)]),
        (draw, [(0, 1), (2, 2)]),
        (count, [(0, 1), (2, 2)]),
        (write, [(2, 2)]),  # the tensors of the step before that are gone
        (scale_moments, [(2, 2)]),
    ],
)
def test_the_rest_of_the_body_is_a_phase_of_its_own_if_it_has_changed_something(
    training: Training, rest: Callable[[Training], None], offered: list[tuple[int, int]]
) -> None:
    for _ in range(3):
        training.state.iteration.phase = 1  # as `Job.step` does
        training.step()
        rest(training)
        training.recorder.later(2)
    records = [r for r, _ in read(training.kept.memory) if r.final and r.step == training.steps]
    found = phases(training)
    assert found == offered
    own = [(0, 2)] if offered == [(0, 2)] else [(0, 1), (2, 2)]
    assert [(r.phase, r.until) for r in reversed(records)] == own


def test_a_rest_that_has_changed_something_without_a_note_is_not_offered(
    training: Training,
) -> None:
    training.step()
    draw(training)
    training.recorder.later(2)
    write(training)
    assert phases(training) == []


def test_a_phase_within_a_step_is_none(training: Training) -> None:
    """A loop that fetches a batch ahead comes back when the optimizer has stepped."""
    training.state.iteration.phase = 1
    training.step()
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.recorder.later(2)
    training.completed()
    assert phases(training) == [(0, 1)]
