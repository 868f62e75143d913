"""Loaders that are not ours, in a `Job` of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast
from outlast.elastic import ElasticLoader, ShardedStream
from outlast.elastic.job import third_party_loaders
from outlast.errors import CheckpointError
from procs import Job


class Buffering:
    """A loader whose state has other keys and lengths at each place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": None, "ahead": [], "inner": {}}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "at" not in state:
            raise KeyError("at")
        self.state = state


class Loader(Buffering, DataLoader[Any]):
    """One that can be told by its class."""

    def __init__(self) -> None:
        Buffering.__init__(self)


SOMEWHERE = {"at": {"shard": 3}, "ahead": [5, torch.ones(2), (1, 2)], "inner": {"empty": []}}
OTHER_WAY = {"at": None, "ahead": [1], "more": {"x": 1}}


def job(path: Path, **given: Any) -> outlast.Job:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outlast.Job(path, model=model, optimizer=optimizer, every=None, **given)


@pytest.mark.parametrize("given", ["loader", "states"])
def test_a_state_of_any_structure_comes_back_whole(tmp_path: Path, given: str) -> None:
    def part(source: Any) -> dict[str, Any]:
        return {"loader": source} if given == "loader" else {"states": {"data": source}}

    one = Loader()
    with job(tmp_path, **part(one)) as first:
        first.restore()
        one.state = SOMEWHERE
        first.step()
    other = Loader()
    other.state = OTHER_WAY
    with job(tmp_path, **part(other)) as second:
        assert second.restore() == 1
    assert str(other.state) == str(SOMEWHERE)


def test_one_that_has_no_state_in_the_checkpoint(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        first.restore()
        first.step()
    added = Loader()
    with job(tmp_path, states={"data": added}) as second:
        assert second.restore() == 1
    assert added.state["at"] is None, "it stays as it is"
    with job(tmp_path, loader=Buffering()) as third:
        with pytest.raises((CheckpointError, ValueError), match="no state of a Buffering"):
            third.restore()
        assert third.steps == 0


def states_of(*places: Any) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for rank, place in enumerate(places):
        source = Buffering()
        source.state = {"at": place}
        states |= third_party_loaders.saved(source, rank)
    return states


def loaded(states: dict[str, Any], rank: int, world_size: int, begun: bool = True) -> Any:
    source = Buffering()
    third_party_loaders.load(source, states, rank, world_size, begun=begun)
    return source.state["at"]


def test_every_rank_gets_its_own() -> None:
    assert [loaded(states_of(5, 6), rank, 2) for rank in range(2)] == [5, 6]


def test_at_another_size_places_of_ranks_are_refused() -> None:
    for size in (1, 3):
        with pytest.raises(CheckpointError, match=rf"saved by 2 ranks, .* {size} now: .*ElasticL"):
            loaded(states_of(5, 6), 0, size)


def test_at_another_size_equal_counts_are_no_place_in_the_whole() -> None:
    """So it is with torchdata and a sampler for each rank: all have had as many."""
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        loaded(states_of(3, 3), 0, 4)


def test_a_loader_that_takes_any_size_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffering, "resizable", True, raising=False)
    assert [loaded(states_of(7, 7), rank, 3) for rank in range(3)] == [7, 7, 7]


def test_before_the_first_step_no_place_is_lost() -> None:
    assert [loaded(states_of(5, 6), rank, 3, begun=False) for rank in range(3)] == [5, 6, 5]


def test_which_ones_they_are() -> None:
    data = TensorDataset(torch.zeros(4))
    ours = (
        ElasticLoader(data, global_batch_size=2),
        ShardedStream(["a"], lambda shard, offset: [], batch_size=1),
    )
    for each in ours:
        assert not third_party_loaders.is_foreign(each, loads_data=True)
    assert third_party_loaders.is_foreign(Buffering(), loads_data=True)
    assert not third_party_loaders.is_foreign(Buffering()), "a scheduler, for all that is known"
    assert third_party_loaders.is_foreign(Loader())
    assert not third_party_loaders.is_foreign(None, loads_data=True)


def test_from_memory_and_from_storage_every_rank_gets_its_own(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    def restored(size: int) -> list[Any]:
        with ranks("foreign", str(tmp_path / "saved"), nprocs=size) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(size)))
            return [[(line["step"], line["state"]) for line in job.lines(r)] for r in range(size)]

    own: list[Any] = [{"at": {"rank": rank}, "ahead": list(range(rank))} for rank in range(3)]
    for rank, (first, memory, storage) in enumerate(restored(2)):
        assert first == (0, {"at": None})
        assert memory == (1, own[rank])
        assert storage == (1, own[rank])
    with ranks("foreign", str(tmp_path / "saved"), nprocs=3) as job:
        job.start_all()
        assert 0 not in job.wait_all().values()
        for rank in range(3):
            assert "the Loader was saved by 2 ranks" in job.errors(rank)
