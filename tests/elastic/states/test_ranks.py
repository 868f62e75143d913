"""Real processes over gloo: all replicas save, load and fail together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.states.test_saving import names_in
from procs import Job

Ranks = Callable[..., Job]


@pytest.fixture
def run(ranks: Ranks, folder: Path) -> Callable[..., Job]:
    """Runs a scenario that must succeed."""

    def run(*args: str, nprocs: int = 2, codes: tuple[int, ...] = (0,), **kwargs: Any) -> Job:
        with ranks("states", *args, nprocs=nprocs, **kwargs) as job:
            job.start_all()
            ended = set(job.wait_all().values())
            assert ended == set(codes), "\n".join(map(job.errors, range(nprocs)))
        return job

    return run


def said(job: Job, event: str, field: str) -> list[list[Any]]:
    """The message of each rank."""
    return [
        [line[field] for line in job.lines(rank) if line["event"] == event]
        for rank in range(job.nprocs)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["", "yes"])
def test_saved_by_n_and_loaded_by_m(run: Callable[..., Job], asynchronous: str) -> None:
    for before, after in ((3, 1), (1, 2), (2, 3)):
        args = ("saves", asynchronous) if asynchronous else ("saves",)
        saved = run(*args, nprocs=before)
        ((where,), *others) = said(saved, "saved", "value")
        assert all(other == [where] for other in others)
        assert set(os.listdir(where)) >= {"manifest.json", "__0_0.distcp"}
        loaded = run("loads", nprocs=after)
        for rank in range(after):
            (line,) = (line for line in loaded.lines(rank) if line["event"] == "loaded")
            assert line["found"] == [True, True, False]
            assert line["sum"] == sum(range(before + 1))
            assert line["text"] == "rank 0"


def test_replicas_without_a_group(run: Callable[..., Job], folder: Path) -> None:
    job = run("saves_without_a_group", nprocs=3)
    where = str(folder / "states" / "step-00000001")
    assert said(job, "saved", "value") == [[where], [None], [None]]
    assert said(job, "state", "calls") == [[["sync", "save"]], [["sync"]], [["sync"]]]
    loaded = run("loads_without_a_group", nprocs=3)
    assert said(loaded, "loaded", "text") == [["rank 0"]] * 3


def test_replicas_that_disagree_on_what_is_registered(
    run: Callable[..., Job], folder: Path
) -> None:
    job = run("disagrees", nprocs=3)
    for (message,) in said(job, "raised", "message"):
        assert "rank 0 has 'first', rank 1 does not" in message
        assert "rank 0 has 'first', rank 2 does not" in message
        assert "rank 2 has 'own', 'third', rank 0 does not" in message
    assert said(job, "state", "calls") == [[[]]] * 3
    assert said(job, "returned", "value") == [[str(folder / "states" / "step-00000001")]] * 3


def test_a_sync_that_raises_on_one_replica(
    run: Callable[..., Job], folder: Path, tmp_path: Path
) -> None:
    job = run("sync_fails", "alone", nprocs=3, env={"MARKS": str(tmp_path)})
    for (message,) in said(job, "raised", "message"):
        assert "the sync of state 'b second' failed on rank 1 on " in message
        assert "RuntimeError: no sync today" in message
    assert said(job, "state", "calls") == [[["sync"]]] * 3
    assert said(job, "returned", "value") == [[str(folder / "states" / "step-00000001")]] * 3


@pytest.mark.slow
def test_a_sync_that_raises_while_others_are_in_its_collective(
    run: Callable[..., Job], folder: Path, tmp_path: Path
) -> None:
    job = run("sync_fails", "collective", nprocs=3, env={"MARKS": str(tmp_path)})
    for (message,) in said(job, "raised", "message"):
        assert "the sync of state 'b second' failed on rank 1 on " in message
        assert "RuntimeError: no collective today" in message
    assert not folder.exists()


def test_a_save_that_raises(run: Callable[..., Job], folder: Path) -> None:
    job = run("save_fails", nprocs=3)
    for messages in said(job, "raised", "message"):
        assert len(messages) == 2
        for message in messages:
            assert "failed on rank 0 on " in message
            assert "the state 'a' could not be saved: RuntimeError: no save today" in message
    assert said(job, "returned", "value") == [[str(folder / "states" / "step-00000001")]] * 3
    assert names_in(folder) == ["step-00000001"]
    assert not (folder / "mine").exists()


def test_a_load_that_raises_on_one_replica(run: Callable[..., Job]) -> None:
    job = run("load_fails", nprocs=2)
    for (message,) in said(job, "raised", "message"):
        assert "failed on rank 1 on " in message
        assert "the state 'b' could not be loaded: RuntimeError: no load today" in message
    assert said(job, "returned", "value") == [[True]] * 2


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_sync_that_a_replica_does_not_reach(
    run: Callable[..., Job], folder: Path, tmp_path: Path, when: str
) -> None:
    job = run("one_does_not_come", when, nprocs=3, env={"MARKS": str(tmp_path)})
    messages = said(job, "raised", "message")
    for rank in (0, 2):
        assert "rank 1 did not make the call within 0:00:01" in messages[rank][0]
        assert said(job, "raised", "type")[rank] == ["RankTimeout"]
    if when == "later":
        assert "rank 1 did not make the call" in messages[1][0]  # reported when it arrived
        assert names_in(folder) == ["step-00000001"]
    else:
        assert "rank 1 cannot reach the other ranks" in messages[1][0]
        assert not folder.exists()
    assert said(job, "state", "calls") == [[[]]] * 3


def test_a_replica_that_is_killed_in_its_sync(
    run: Callable[..., Job], folder: Path, tmp_path: Path
) -> None:
    env = {"MARKS": str(tmp_path)}
    job = run("one_is_killed_in_its_sync", nprocs=3, codes=(0, -9), env=env)
    messages = said(job, "raised", "message")
    assert messages[1] == []
    for rank in (0, 2):
        assert "the sync of state 'a': rank 1 did not make the call" in messages[rank][0]
    assert not folder.exists()


def test_an_interrupt_between_the_steps_of_a_save(run: Callable[..., Job], folder: Path) -> None:
    job = run("interrupted")
    (message,) = said(job, "raised", "message")[0]
    assert "rank 1 on " in message
    assert "KeyboardInterrupt" in message
    assert said(job, "returned", "value") == [[str(folder / "states" / "step-00000002")]] * 2


def test_a_save_in_the_background_whose_group_is_lost(
    run: Callable[..., Job], folder: Path, tmp_path: Path
) -> None:
    job = run("group_is_lost", codes=(0, -9), env={"MARKS": str(tmp_path)})
    # The save itself needs no other rank, so its checkpoint is number 2.
    assert said(job, "returned", "value")[0] == [str(folder / "states" / "step-00000003")]
    (message,) = said(job, "raised", "message")[0]
    assert "the process group of this call is gone" in message
    assert said(job, "loaded", "text")[0] == ["new"]


# --------------------------------------------------------------------------- ready-made states


def drawn(job: Job) -> list[Any]:
    return [values for (values,) in said(job, "drawn", "values")]


@pytest.mark.slow
def test_random_generators_come_back_by_rank(run: Callable[..., Job]) -> None:
    before = drawn(run("saves_random", nprocs=3))
    assert before[0] != before[1] != before[2]
    assert drawn(run("loads_random", nprocs=3)) == before
    # Fewer: each rank keeps its state. More: new ranks have distinct, deterministic states.
    assert drawn(run("loads_random", nprocs=1)) == before[:1]
    more = drawn(run("loads_random", nprocs=5))
    assert more[:3] == before
    assert len({str(values) for values in more}) == 5
    assert drawn(run("loads_random", nprocs=5)) == more


def test_generators_that_stood_alike_stand_alike_again(run: Callable[..., Job]) -> None:
    before = drawn(run("saves_random", "alike", nprocs=2))
    assert before[0] == before[1]
    assert drawn(run("loads_random", nprocs=3)) == [before[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("sharded", marks=pytest.mark.fsdp2), "ddp"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 3), (2, 1), (1, 2)))],
)
def test_a_model_trains_on_at_another_size(
    run: Callable[..., Job], kind: str, before: int, after: int
) -> None:
    saved = said(run(kind, "save", nprocs=before), "weights", "values")
    loaded = said(run(kind, "load", nprocs=after), "weights", "values")
    for (values,) in [*saved, *loaded]:
        assert values == pytest.approx(saved[0][0], rel=1e-5, abs=1e-6)


@pytest.mark.fsdp2
def test_a_sharded_module_is_refused_as_a_whole_one(run: Callable[..., Job]) -> None:
    run("sharded", "save", nprocs=2)
    job = run("sharded", "refused", nprocs=2)
    for (message,) in said(job, "raised", "message"):
        assert "the state 'wrong' could not be saved: ValueError" in message
        assert "ShardedState saves such a module" in message
