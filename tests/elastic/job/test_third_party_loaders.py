"""Third-party data loaders in a `Job`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastic.small_jobs import job
from outlast.elastic.job.parts import ThirdPartyLoader
from outlast.errors import CheckpointError
from procs import Job


class Buffering:
    """A loader whose state has different keys and lengths at each position."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": None, "ahead": [], "inner": {}}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "at" not in state:
            raise KeyError("at")
        self.state = state


class Loader(Buffering, DataLoader[Any]):
    """A loader that is recognized by its class."""

    def __init__(self) -> None:
        Buffering.__init__(self)


IN_AN_EPOCH = {"at": {"shard": 3}, "ahead": [5, torch.ones(2), (1, 2)], "inner": {"empty": []}}
ELSEWHERE = {"at": None, "ahead": [1], "more": {"x": 1}}


@pytest.mark.parametrize("given_as", ["loader", "states"])
def test_a_state_of_any_structure_is_restored_exactly(tmp_path: Path, given_as: str) -> None:
    def options(source: Any) -> dict[str, Any]:
        return {"loader": source} if given_as == "loader" else {"states": {"data": source}}

    one = Loader()
    with job(tmp_path, **options(one)) as first:
        first.restore()
        one.state = IN_AN_EPOCH
        first.step()
    other = Loader()
    other.state = ELSEWHERE
    with job(tmp_path, **options(other)) as second:
        assert second.restore() == 1
    assert str(other.state) == str(IN_AN_EPOCH)


def test_a_loader_without_a_state_in_the_checkpoint(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        first.restore()
        first.step()
    added = Loader()
    with job(tmp_path, states={"data": added}) as second:
        assert second.restore() == 1
    assert added.state["at"] is None, "unchanged"
    with job(tmp_path, loader=Buffering()) as third:
        with pytest.raises((CheckpointError, ValueError), match="no state of a Buffering"):
            third.restore()
        assert third.steps == 0


def states_of(*positions: Any) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for rank, position in enumerate(positions):
        source = Buffering()
        source.state = {"at": position}
        states |= ThirdPartyLoader(source, rank, len(positions), required=True).save()
    return states


def loaded(states: dict[str, Any], rank: int, world_size: int, steps: int = 1) -> Any:
    source = Buffering()
    loader = ThirdPartyLoader(source, rank, world_size, required=True)
    loader.load(states, steps)
    return source.state["at"]


def test_each_rank_gets_its_own_state() -> None:
    assert [loaded(states_of(5, 6), rank, 2) for rank in range(2)] == [5, 6]


def test_another_world_size_is_refused() -> None:
    for size in (1, 3):
        with pytest.raises(CheckpointError, match=rf"saved by 2 ranks, .* {size} now: .*ElasticL"):
            loaded(states_of(5, 6), 0, size)


def test_equal_states_are_not_taken_for_a_global_position() -> None:
    """torchdata with one sampler per rank: all ranks have consumed equally many samples."""
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        loaded(states_of(3, 3), 0, 4)


def test_a_resizable_loader_is_restored_at_another_world_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Buffering, "resizable", True, raising=False)
    assert [loaded(states_of(7, 7), rank, 3) for rank in range(3)] == [7, 7, 7]


def test_the_loaded_state_is_kept_until_the_next_step() -> None:
    """torchdata's loader begins an iteration when it is asked, before the program sets the epoch;
    accelerate's says what it was before.
    """
    steps, ended, source = 1, 0, Buffering()
    loader = ThirdPartyLoader(source, 0, 1, required=True, moment=lambda: (steps, ended))
    loader.load(states_of(5), 1)
    source.state = {"at": 0}
    assert loader.save() == states_of(5)
    assert loader.live(None, {0: loader.own()}, True) == states_of(5)
    steps = 2
    assert loader.save() == states_of(0)


@pytest.mark.parametrize("what", ["an epoch has ended", "it was iterated"])
def test_the_loaded_state_is_not_kept_where_it_came_to_its_end_without_a_step(what: str) -> None:
    ended, source = 0, Buffering()
    loader = ThirdPartyLoader(source, 0, 1, required=True, moment=lambda: (1, ended))
    loader.load(states_of(5), 1)
    source.state = {"at": 0}
    if what == "it was iterated":
        source._iterator = iter(())
    else:
        ended = 1
    assert loader.save() == states_of(0)


def test_before_the_first_step_any_world_size_is_accepted() -> None:
    assert [loaded(states_of(5, 6), rank, 3, steps=0) for rank in range(3)] == [5, 6, 5]


@pytest.mark.slow
def test_each_rank_gets_its_own_state_from_memory_and_from_storage(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    def restored(size: int) -> list[Any]:
        with ranks("third_party_loader", str(tmp_path / "saved"), nprocs=size) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(size)))
            return [[(line["step"], line["state"]) for line in job.lines(r)] for r in range(size)]

    own: list[Any] = [{"at": {"rank": rank}, "ahead": list(range(rank))} for rank in range(3)]
    for rank, (first, memory, storage) in enumerate(restored(2)):
        assert first == (0, {"at": None})
        assert memory == (1, own[rank])
        assert storage == (1, own[rank])
    with ranks("third_party_loader", str(tmp_path / "saved"), nprocs=3) as job:
        job.start_all()
        assert 0 not in job.wait_all().values()
        for rank in range(3):
            assert "the Loader was saved by 2 ranks" in job.errors(rank)
