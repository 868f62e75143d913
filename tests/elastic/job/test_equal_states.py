"""`states` that differ between ranks: their values, and what a restore would lose."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import outlast
from elastic.small_jobs import job
from outlast.async_checkpoint.beside import Beside, differing
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.job.by_rank.equal_states import EqualStates, digest_of, refusal, values_of
from outlast.elastic.job.by_rank.per_rank import PerRankState
from outlast.errors import CheckpointError


class Kept:
    """An object with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


PAIRS: list[tuple[Any, Any]] = [
    (1.25, float("inf")),
    (1, 2),
    (True, False),
    ("a", "b"),
    (b"a", b"b"),
    (None, 0),
    ("x" * 200, "x" * 199 + "y"),
    (torch.tensor(1.25), torch.tensor(1.5)),
    (torch.tensor([3]), torch.tensor([4])),
    (numpy.float32(1), numpy.float32(2)),
    (numpy.arange(3), numpy.arange(3) + 1),
    (Mode.LOW, Mode.HIGH),
    ({"a", "b"}, {"a", "c"}),
    ([1, [2, {"x": 3}]], [1, [2, {"x": 4}]]),
    (deque([1, 2]), deque([1, 3])),
    (list(range(1000)), list(range(1001))),
    (OrderedDict(a=1), OrderedDict(a=1, b=2)),
    (float("nan"), 0.0),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_values_differ_and_are_deterministic(one: Any, other: Any) -> None:
    first, second = values_of({"value": one}), values_of({"value": other})
    assert digest_of(first) != digest_of(second)
    assert first == values_of({"value": one})


@pytest.mark.slow
def test_values_are_the_same_in_another_process() -> None:
    code = (
        "from outlast.elastic.job.by_rank.equal_states import digest_of, values_of\n"
        "print(digest_of(values_of({'b': {'x', 'y', 'z'}, 'a': 'text'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = digest_of(values_of({"a": "text", "b": {"z", "y", "x"}}))
    assert done.stdout.strip() == here


def test_tensors_are_compared_by_themselves() -> None:
    small, large = torch.arange(4.0), torch.arange(100_000.0)
    state = {"small": small, "large": large, "n": 1, "rest": lambda: None}
    assert set(values_of(state)) == {"['n']"}  # what cannot be saved is left out
    found = values_of(state, tensors=True)
    assert set(found) == {"['small']", "['large']"}
    assert found == values_of({**state, "small": small.clone()}, tensors=True)
    changed = values_of({"small": small + 1, "large": large + 1}, tensors=True)
    assert all(changed[name] != found[name] for name in found)


def test_the_ranks_of_a_difference() -> None:
    records = [{"digests": {"a": "1", "b": "1"}, "id": 3}, {"digests": {"a": "1", "b": "1"}}]
    assert differing([json.dumps(each).encode() for each in records]) == {}
    records += [{"digests": {"a": "2"}}, {"digests": {"a": "3", "b": "1", "c": "1"}}]
    found = differing([json.dumps(each).encode() for each in records])
    assert found == {"a": 2}
    assert differing([b"{}", b"{}"]) == {}


def noted(step: int, rank: int, value: str) -> list[Any]:
    return [step, f"state {step}", rank, {"best": {"['val']": value}}]


def test_a_value_that_would_be_lost_is_refused() -> None:
    old = [[noted(4, 0, "inf"), noted(5, 0, "1.25")], [noted(4, 1, "inf"), noted(5, 1, "inf")]]
    parts = [[each, [], {}] for each in old]
    why = refusal(parts, [0], is_resized=False)
    assert (
        "states['best'] differs between ranks: ['val'] is 1.25 on rank 0, and inf on rank 1" in why
    )
    assert "at step 5" in why
    assert "states={'best': outlast.per_rank(...)}" in why
    # Equal at the newest step that both have noted: what rank 1 had alone at step 6 is of no step.
    parts = [
        [[noted(4, 0, "1.25"), noted(5, 0, "2")], [], {}],
        [[noted(4, 1, "inf"), noted(5, 1, "2"), noted(6, 1, "3")], [], {}],
    ]
    assert refusal(parts, [0], is_resized=False) == ""
    # The values of a rank whose host is lost are known from its mirror.
    lost = [[], [], {}], [old[1], old[0], {}]
    assert "['val'] is 1.25 on rank 0" in refusal(lost, [0], is_resized=False)
    # A new process, whose predecessor's memory is gone, has nothing to lose.
    assert refusal([[[], [], {}], [[noted(5, 1, "inf")], [], {}]], [0], is_resized=False) == ""


def test_a_known_difference_with_a_lost_rank_is_refused() -> None:
    parts = [[[noted(5, 1, "inf")], [], {"best": "differed on ranks 0 and 1 at step 5"}]]
    assert refusal(parts, [], is_resized=False) == ""
    assert "states['best'] differed on ranks 0 and 1" in refusal(parts, [], is_resized=True)


def test_a_state_of_each_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path / "c", states={"best": outlast.per_rank(Kept(torch.ones(2)))}) as made:
        made.restore()
        made.states["best"].load_state_dict({"value": torch.full((2,), 5.0)})
        made.steps = 1
        made.save().result()
    mine = Kept(torch.zeros(2))
    with job(tmp_path / "c", states={"best": outlast.per_rank(mine)}) as made:
        assert made.restore() == 1
        made.steps = 0  # saves nothing
    assert mine.value.tolist() == [5.0, 5.0]
    with (
        job(tmp_path / "c", states={"best": Kept(torch.zeros(2))}) as made,
        pytest.raises(CheckpointError, match=r"'best' could not be loaded: each rank has saved"),
    ):
        made.restore()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_did_not_exist_keeps_its_state(rank: int) -> None:
    kept = Kept(3)
    part = PerRankState(outlast.per_rank(kept), "best", rank)
    part.load(part.live(None, {}, trusted=False), steps=1)
    assert kept.value == 3


def test_a_state_of_all_ranks_becomes_one_of_each(tmp_path: Path) -> None:
    with job(tmp_path / "c", states={"best": Kept([1.25, torch.ones(3)])}) as made:
        made.restore()
    mine = Kept(None)
    with job(tmp_path / "c", states={"best": outlast.per_rank(mine)}) as made:
        made.restore()
    assert mine.value[0] == 1.25
    assert mine.value[1].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "wrong", [nn.Linear(1, 1), 3, torch.optim.SGD(nn.Linear(1, 1).parameters())]
)
def test_what_is_no_state_of_a_rank(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"not a {type(wrong).__name__}"):
        outlast.per_rank(wrong)


def test_the_step_at_which_an_epoch_began(tmp_path: Path) -> None:
    """A sum over an epoch's batches begins where the epoch does, and not where it goes on."""
    sums: list[float] = []

    class Stop(Exception):
        pass

    def train(stop_at: int | None) -> None:
        total = Kept(0.0)
        with job(tmp_path / "c", states={"total": total}, every=1) as made:
            made.restore()
            for _ in made.epochs(2):
                if made.steps == made.epoch_start:
                    total.value = 0.0
                for batch in made.batches([1.0, 2.0, 4.0, 8.0]):
                    if made.steps == stop_at:
                        made.checkpointer.wait()
                        raise Stop
                    total.value += batch
                    made.step()
                sums.append(total.value)

    for stop_at in (2, 4, 5):
        with pytest.raises(Stop):
            train(stop_at)
    train(None)
    assert set(sums) == {15.0}
    assert len(sums) >= 2


def told(checks: list[EqualStates], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What two ranks log of a save."""
    store = MemoryStore()
    ledgers = [CallLedger(store, "x", rank, 2) for rank in range(2)]
    saves = [check.at_save(Beside(), each, 5) for check, each in zip(checks, ledgers, strict=True)]
    found = differing([json.dumps({"digests": {**each.digests}}).encode() for each in saves])
    for each in saves:
        each.committed(found)
    return [each.getMessage() for each in caplog.records]


@pytest.mark.parametrize("name", ["", "d"])
def test_learning_rates_that_differ_are_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As with a scheduler that gets the loss of each rank: the weights differ then."""
    logged: list[str] = []
    for pair in ([0.05, 0.05], [0.05, 0.005]):
        optimizers = [torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=rate) for rate in pair]
        logged = told([EqualStates({}, {name: each}) for each in optimizers], caplog)
        assert len(logged) == (pair[0] != pair[1])
    what = f"optimizer {name}".strip()
    start = f"{what}.param_groups differ between ranks: [0]['lr'] is 0.05 on rank 0, and 0.005 on"
    assert logged[0].startswith(start)
    assert "per_rank" not in logged[0]


def test_a_module_is_not_recommended_to_per_rank(caplog: pytest.LogCaptureFixture) -> None:
    """As an average of the weights that rank 0 alone updates: `per_rank` takes no module."""
    logged = told([EqualStates({"ema": nn.Linear(2, 2)}) for _ in range(2)], caplog)
    assert logged
    assert all("states['ema'] differs" in each and "per_rank" not in each for each in logged)
