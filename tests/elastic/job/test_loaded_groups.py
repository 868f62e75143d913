"""The groups of an optimizer are loaded wherever torch loads them; moments go by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.errors import CheckpointMismatch

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(*, named: bool = False, lr: Any = 0.1, **options: Any) -> Made:
    model = nn.Linear(4, 4)
    parameters: Any = model.named_parameters() if named else model.parameters()
    return model, torch.optim.AdamW(parameters, lr=lr, **options)


def train(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> int:
    with outlast.Job(path, model=model, optimizer=optimizer, every=1, signals=()) as job:
        begun = job.restore()
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
    return begun


# Of the newer torch; in that of torch 2.6, there is no such key yet.
KEY = "decoupled_weight_decay" if "decoupled_weight_decay" in made()[1].defaults else "maximize"


def older() -> Made:
    """As of a torch whose AdamW lacks a key."""
    model, optimizer = made()

    def before(state: Any) -> None:
        for group in state["param_groups"]:
            group.pop(KEY)

    optimizer.register_state_dict_post_hook(lambda _, state: before(state))
    return model, optimizer


def extended() -> Made:
    model, optimizer = made()
    optimizer.param_groups[0]["lr_scale"] = 0.5
    return model, optimizer


CHANGES: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {
    "a key of a newer torch": (older, made),
    "a key that the program has added": (extended, made),
    "names at the save only": (lambda: made(named=True), made),
    "names now only": (made, lambda: made(named=True)),
    "a rate that was a number": (made, lambda: made(lr=torch.tensor(0.3))),
    "a rate that was a tensor": (lambda: made(lr=torch.tensor(0.1)), lambda: made(lr=0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_group_that_has_changed(tmp_path: Path, change: str) -> None:
    save, load = CHANGES[change]
    train(tmp_path, *save())
    model, optimizer = load()
    present = type(optimizer.param_groups[0]["lr"])
    assert train(tmp_path, model, optimizer) == 2
    (group,) = optimizer.param_groups
    assert float(group["lr"]) == pytest.approx(0.1)
    assert type(group["lr"]) is present
    assert group[KEY] is made()[1].defaults[KEY]
    assert [float(moments["step"]) for moments in optimizer.state.values()] == [4, 4]


def test_a_group_that_was_not_saved(tmp_path: Path) -> None:
    train(tmp_path, *made())
    model, optimizer = made()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(CheckpointMismatch, match="has no parameter group 1 of the optimizer"):
        train(tmp_path, model, optimizer)


def layers(*names: str) -> Made:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    return model, torch.optim.Adam(model.named_parameters(), lr=0.1)


def test_moments_go_to_the_parameter_of_the_same_name(tmp_path: Path) -> None:
    model, optimizer = layers("a", "b")
    train(tmp_path, model, optimizer)
    saved = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
    model, optimizer = layers("b", "a")
    assert train(tmp_path, model, optimizer, steps=0) == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved[name]), name
    model, optimizer = layers("a", "b")  # also within a DDP or a compiled model
    names = optimizer.param_groups[0]["param_names"]
    optimizer.param_groups[0]["param_names"] = [f"_orig_mod.module.{name}" for name in names]
    assert train(tmp_path, model, optimizer, steps=0) == 2


@pytest.mark.parametrize("other", ["b", "module"])
def test_moments_follow_the_names_in_the_model_if_the_optimizer_has_another_order(
    tmp_path: Path, other: str
) -> None:
    """Of parameters of one shape, torch would exchange the moments in silence. `module` is also the
    name of what a DDP wraps.
    """
    model = nn.ModuleDict({"a": nn.Linear(4, 4), other: nn.ModuleDict({"a": nn.Linear(4, 4)})})

    def optimizer(*order: str) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for name in order for p in model[name].parameters()])

    first = optimizer("a", other)
    with outlast.Job(tmp_path, model=model, optimizer=first, signals=()) as job:
        job.restore()
        for number, each in enumerate(model.parameters()):
            each.grad = torch.full_like(each, number + 1.0)
        first.step()
        job.step()
    saved = {n: first.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
    assert len({float(each.max()) for each in saved.values()}) == 4
    for again in optimizer(other, "a"), optimizer("a", other):
        with outlast.Job(tmp_path, model=model, optimizer=again, signals=()) as job:
            assert job.restore() == 1
            assert "outlast_names" not in again.param_groups[0]
        for name, parameter in model.named_parameters():
            assert torch.equal(again.state[parameter]["exp_avg"], saved[name]), name


def test_parameters_of_other_names_are_refused(tmp_path: Path) -> None:
    train(tmp_path, *layers("a", "b"))
    model, optimizer = layers("a", "b")
    names = optimizer.param_groups[0]["param_names"]
    optimizer.param_groups[0]["param_names"] = [name.replace("b.", "c.", 1) for name in names]
    with pytest.raises(
        CheckpointMismatch, match=r"\['c.bias', 'c.weight'\] are new, and \['b.bias'"
    ):
        train(tmp_path, model, optimizer)


def test_a_group_with_fewer_parameters_is_refused_by_its_number(tmp_path: Path) -> None:
    """Before the first step, there are no moments that would not fit."""
    model, optimizer = made()
    train(tmp_path, model, optimizer, steps=0)
    with_bias_only = torch.optim.AdamW([model.bias])
    with pytest.raises(CheckpointMismatch, match=r"group 0 of the optimizer has 1 .* 2 were saved"):
        train(tmp_path, model, with_bias_only, steps=0)


def unfreezing(path: Path, *, named: bool) -> tuple[int, Made]:
    """Two steps; from the second one on, the last layer is trained, too."""
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("last", nn.Linear(4, 4))
    first, more = (
        list(layer.named_parameters(prefix=name) if named else layer.parameters())
        for name, layer in model.named_children()
    )
    optimizer = torch.optim.AdamW(first, lr=0.1)
    with outlast.Job(path, model=model, optimizer=optimizer, every=1, signals=()) as job:
        begun = job.restore()
        for step in range(begun, 2):
            if step == 1:
                optimizer.add_param_group({"params": more, "lr": 0.02})
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
    return begun, (model, optimizer)


@pytest.mark.parametrize("named", [False, True])
def test_a_group_that_was_added_in_training_is_added_again(tmp_path: Path, named: bool) -> None:
    _, (model, optimizer) = unfreezing(tmp_path, named=named)
    begun, (found, restored) = unfreezing(tmp_path, named=named)
    assert begun == 2
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.02]
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], restored.state[other]["exp_avg"])
    assert optimizer.state_dict()["param_groups"] == restored.state_dict()["param_groups"]


def test_a_group_with_a_parameter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    with outlast.Job(tmp_path, model=model, optimizer=optimizer, signals=()) as job:
        job.restore()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        job.step()
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    job = outlast.Job(tmp_path, model=model, optimizer=optimizer, signals=())
    with pytest.raises(CheckpointMismatch, match=r"group 1 before .* did not have them"):
        job.restore()
    assert len(optimizer.param_groups) == 1
    job.close()


def thawing(path: Path, *, end: int, again: bool = False) -> None:
    """From the second step on, the last layer is trained, too; if `again`, from the beginning."""
    model, _ = layers("first", "last")
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[1].requires_grad_(again)
    with outlast.Job(path, model=model, optimizer=optimizer, every=1, signals=()) as job:
        job.restore()
        while job.steps < end:
            if job.steps == 1:
                model[1].requires_grad_()
                optimizer.add_param_group({"params": model[1].parameters()})
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            job.step()


def test_a_group_that_is_added_again_must_be_trained(tmp_path: Path) -> None:
    """What the program did in a step that is not made again: it would train less in silence."""
    thawing(tmp_path, end=3)
    with pytest.raises(CheckpointMismatch, match=r"in step 4: last.weight, last.bias\. .*before"):
        thawing(tmp_path, end=5)
    with outlast.Checkpointer(tmp_path) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints()][-1] == 3
    thawing(tmp_path, end=5, again=True)


def test_a_group_that_lacks_is_named_with_its_parameters(tmp_path: Path) -> None:
    model, _ = layers("a", "b")
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    train(tmp_path, model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(
        CheckpointMismatch, match=r"2 were saved. Add group 1 before .*: b.weight, b.bias"
    ):
        train(tmp_path, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
