"""Which gradients of a step may still be needed after it, by what the program does with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from outlast.elastic.job.live.gradients import Gradients


class ChangesGradients(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)
        super().step()


class Training:
    """Two models, and a layer that no optimizer has; `d` is called on what `g` has made."""

    def __init__(self) -> None:
        self.models = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("g", "d", "other")})
        self.g, self.d, self.other = self.models.values()
        self.of_g = torch.optim.Adam(self.g.parameters())
        self.of_d = ChangesGradients(self.d.parameters())
        named = dict(self.models.named_parameters())
        self.gradients = Gradients(named, [self.of_g, self.of_d])

    def backward(self, *models: nn.Module, create_graph: bool = False) -> None:
        x = torch.randn(4, 2)
        for model in models:
            x = model(x)
        x.square().sum().backward(create_graph=create_graph)

    def note(self, *, stepped: bool) -> dict[int, torch.Tensor]:
        present = [each for each in self.models.parameters() if each.grad is not None]
        return self.gradients.note(stepped, present)

    def needed(self, later: Callable[[Training], None], *, stepped: bool = True) -> str:
        """Which gradient of a step is needed after what comes `later`."""
        left = self.note(stepped=stepped)
        later(self)
        return self.gradients.needed(left)


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture(autouse=True)
def _hook(training: Training) -> Iterator[None]:
    hook = register_optimizer_step_post_hook(lambda each, *_: training.gradients.used(each))
    yield
    hook.remove()
    training.gradients.close()


def nothing(_: Training) -> None:
    pass


def discard(training: Training) -> None:
    training.d.zero_grad()


def discard_and_compute(training: Training) -> None:
    training.d.zero_grad()
    training.backward(training.d)


def accumulate(training: Training) -> None:
    training.backward(training.d)


def accumulate_in_new_memory(training: Training) -> None:
    training.backward(training.d, create_graph=True)


def scale_in_new_memory(training: Training) -> None:
    for parameter in training.d.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    training.backward(training.d)


def set_to_zero(training: Training) -> None:
    training.d.zero_grad(set_to_none=False)
    training.backward(training.d)


def discard_a_part(training: Training) -> None:
    training.d.weight.grad = None
    training.backward(training.d)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    ("later", "needed"),
    [
        (nothing, "d.weight"),
        (discard, ""),
        (discard_and_compute, ""),
        (accumulate, "d.weight"),
        (accumulate_in_new_memory, "d.weight"),
        (scale_in_new_memory, "d.weight"),
        (set_to_zero, "d.weight"),
        (discard_a_part, "d.bias"),
    ],
)
def test_gradients_of_another_models_backward_pass(
    training: Training, later: Callable[[Training], None], needed: str
) -> None:
    """Those in the discriminator came after its optimizer's step."""
    for _ in range(2):  # the second time, the parameters have hooks
        training.backward(training.d)
        training.of_d.step()
        training.of_g.zero_grad()
        training.backward(training.g, training.d)
        training.of_g.step()
        assert training.needed(later) == needed
        training.models.zero_grad()


def test_gradients_that_a_step_has_used_are_not_needed(training: Training) -> None:
    """Whether or not the program discards them, and the optimizer has changed them."""
    training.backward(training.g, training.d)
    training.of_d.step()
    training.of_g.step()
    assert training.needed(nothing) == ""
    assert training.needed(nothing, stepped=False) == ""  # of a step before
    training.backward(training.g)
    assert training.needed(nothing) == "g.weight"


def test_a_program_that_no_longer_discards_its_gradients(training: Training) -> None:
    """While it discards them, what a step has used is not noted: such gradients may be needed."""

    def step(*, discards: bool) -> str:
        training.models.zero_grad()
        training.backward(training.g)
        training.of_g.step()
        if discards:
            training.models.zero_grad()
        return training.needed(nothing)

    assert [step(discards=each) for each in (True, True)] == ["", ""]
    assert step(discards=False) == "g.weight"
    assert [step(discards=each) for each in (False, True, False)] == ["", "", ""]
    training.backward(training.g)
    assert training.needed(nothing) == "g.weight"


def test_a_parameter_that_an_optimizer_is_given_later_counts(training: Training) -> None:
    for _ in range(2):
        training.backward(training.g)
        training.of_g.step()
        training.models.zero_grad()
        assert training.needed(nothing) == ""
    training.of_g.add_param_group({"params": [*training.other.parameters()]})
    training.of_g.step()
    training.backward(training.other)
    assert training.needed(nothing) == "other.weight"


def test_the_step_of_another_optimizer_uses_none(training: Training) -> None:
    training.backward(training.g, training.d)
    training.of_g.step()
    assert training.needed(discard_a_part) == "d.bias"


def test_a_layer_that_no_optimizer_has_counts_in_a_step_without_one(training: Training) -> None:
    training.backward(training.g, training.other)
    training.of_g.step()
    assert training.needed(nothing) == ""
    assert training.needed(nothing, stepped=False) == "other.weight"
    training.g.zero_grad()
    unknown = torch.optim.SGD(training.other.parameters())
    unknown.step()
    training.backward(training.other)
    assert training.needed(nothing) == "other.weight"


def test_a_parameter_outside_of_the_model_that_an_optimizer_has_counts(training: Training) -> None:
    """Of an optimizer in `states`: such a parameter is not among those that are given."""
    named = dict(training.g.named_parameters())
    found = Gradients(named, [training.of_g, training.of_d])
    training.backward(training.d)
    assert {*found.note(True, [])} == {*map(id, training.d.parameters())}
    training.d.zero_grad()
    assert not found.note(True, [])
    found.close()


def test_a_frozen_parameter_needs_no_hook(training: Training) -> None:
    training.backward(training.d)
    training.d.requires_grad_(False)
    assert training.needed(nothing) == "d.weight"
    assert training.needed(discard) == ""


def test_parameters_hold_nothing_after_an_interrupted_end(training: Training) -> None:
    found = Gradients(dict(training.d.named_parameters()), [training.of_d])
    training.backward(training.d)
    assert found.note(True, training.d.parameters())
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None
    training.backward(training.d)  # its hooks are still there
