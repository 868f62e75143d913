"""`Notes` has the states that the generators themselves return, read from memory or not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from outlast.elastic.random_generators import Notes, capture, of_note, set_all

DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),  # holds back the second of two numbers
    lambda: random.gauss(0, 1),
    lambda: random.seed(7),
    lambda: [random.getrandbits(32) for _ in range(700)],
    numpy.random.standard_normal,
    lambda: torch.rand(1),
]


@pytest.mark.parametrize("from_memory", [True, False])
def test_each_draw_is_noted_and_given_back(from_memory: bool) -> None:
    notes = Notes()
    assert notes._reads_python, "the memory of Python's generator is not as expected"
    notes._reads_python = from_memory
    before = notes.take()
    for draw in DRAWS:
        draw()
        noted, now = notes.take(), capture()
        assert noted != before
        found = of_note(noted)
        assert found.keys() == now.keys()
        assert all(torch.equal(found[name], now[name]) for name in now)
        set_all(found)
        assert notes.take() == noted
        before = noted
    assert notes.take() == before


def test_a_program_may_replace_what_returns_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: plain())
    notes = Notes()
    assert not notes._reads_python
    assert torch.equal(of_note(notes.take())["python"], capture()["python"])
