"""Parameters that were trained before a restore and are not now; what an optimizer cannot load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outlast
from outlast.elastic.job.model_parts import ModelModes
from outlast.errors import CheckpointError


def layers(trained: str) -> nn.ModuleDict:
    made = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abcde"})
    for name, each in made.items():
        each.requires_grad_(name in trained)
    return made


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [("ab", "a", ["b"]), ("abcde", "abcd", ["e"]), ("a", "a", []), ("a", "abc", []), ("", "", [])],
)
def test_what_is_not_trained_any_more_is_named_once(
    caplog: pytest.LogCaptureFixture, before: str, now: str, named: list[str]
) -> None:
    modes = ModelModes(layers(now))
    modes.load(ModelModes(layers(before)).save(), 3)
    modes.check(0, 4)
    modes.check(0, 5)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == len(named)
    for text, name in zip(said, named, strict=True):
        assert f"are not in step 4: {name}.weight. What" in text


def test_a_state_that_an_optimizer_does_not_take_is_named(tmp_path: Path) -> None:
    """Adam itself loads no state of a parameter without a `step`."""

    def job() -> outlast.Job:
        model = layers("ab")
        optimizer = torch.optim.Adam(model.parameters())
        return outlast.Job(tmp_path, model=model, optimizer=optimizer, every=None, signals=())

    with job() as one:
        one.restore()
        for name in "ab":
            one.model[name](torch.ones(1)).backward()
        one.optimizer.step()
        one.optimizer.state[one.model["c"].weight]["mine"] = torch.ones(1)
        one.step()
    with job() as one, pytest.raises(CheckpointError, match="the state of 'optimizer' cannot"):
        one.restore()
