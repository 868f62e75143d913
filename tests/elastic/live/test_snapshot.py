"""The copy of the attached objects' states that is made after every step."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from outlast.elastic.job.live.writes import Snapshot


def states() -> list[Any]:
    nested = {"history": [{"loss": 0.5, "step": n} for n in range(3)], "best": None, "on": True}
    return [
        nested,
        OrderedDict(b=1, a=(2, [3.0, -0.0, float("inf")])),
        {"scale": np.float64(1.5), "words": np.arange(3), "kinds": {1, 2}},
        {"rate": lambda step: step, "steps": [1, 2]},  # cannot be pickled
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_snapshot_is_the_state_at_its_time(number: int) -> None:
    state = states()[number]
    snapshot = Snapshot(state)
    found = snapshot.read()
    assert type(found) is type(state)
    assert repr(found) == repr(state)
    for each in state.values():
        if isinstance(each, list):
            each.append("later")
    found = snapshot.read()
    assert "later" not in repr(found)


def test_small_tensors_are_copied_and_large_ones_are_watched() -> None:
    state = {"small": torch.ones(3), "large": torch.zeros(100_000), "more": [torch.ones(2).half()]}
    snapshot = Snapshot(state)
    state["small"] += 1
    assert not snapshot.watched.changed
    state["large"][0] = 1
    assert snapshot.watched.changed
    found = snapshot.read()
    assert torch.equal(found["small"], torch.ones(3))
    assert found["large"].data_ptr() == state["large"].data_ptr()
    assert found["more"][0].dtype == torch.float16


def test_a_long_history_is_not_walked_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python function is called for its entries: 10,000 of them take some milliseconds."""
    from outlast.elastic.job.live import writes

    seen: list[Any] = []
    override = writes._Pickler.reducer_override
    monkeypatch.setattr(
        writes._Pickler, "reducer_override", lambda s, v: (seen.append(v), override(s, v))[1]
    )
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("was copied in Python"))
    history = [{"loss": n / 7, "rate": 0.1, "step": n} for n in range(10_000)]
    found = Snapshot({"history": history}).read()
    assert json.dumps(found["history"]) == json.dumps(history)
    assert not seen
