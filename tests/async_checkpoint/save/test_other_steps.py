"""C1 whichever rank is first: a checkpoint has the files of all ranks, and of its step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from async_checkpoint.checkpoints import NET, left_over, restored, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError
from procs import Job

Ranks = Callable[..., Job]


def messages(ranks: Ranks, name: str, path: Path, *numbers: int) -> list[list[str]]:
    """What each rank raises, in the order of the cases."""
    with ranks("other_steps", name, str(path), *map(str, numbers)) as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, job.errors(0) + job.errors(1)
        return [
            [line["message"] for line in job.lines(rank) if line["event"] == "raised"]
            for rank in range(2)
        ]


@pytest.mark.parametrize(
    "cases",
    [(0, 1), pytest.param(range(2, 10), marks=pytest.mark.slow)],
    ids=["first saves", "later saves"],
)
def test_ranks_that_save_different_steps_all_raise_an_error(
    cases: Sequence[int], ranks: Ranks, tmp_path: Path
) -> None:
    said = messages(ranks, "differ", tmp_path, *cases)
    assert len(said[0]) == len(said[1]) == len(cases)
    for one, other in zip(*said, strict=True):
        assert one == other
        assert "'save of step 20' on rank 0" in one
        assert "'save of step 18' on rank 1" in one
        assert "All ranks must save the same steps" in one


def test_a_preparation_and_a_save_both_raise_an_error(ranks: Ranks, tmp_path: Path) -> None:
    (one,), (other,) = messages(ranks, "one_prepares", tmp_path)
    assert one == other
    assert "'save of step 5' on rank 0" in one
    assert "'preparation of saves' on rank 1" in one
    assert valid_steps(tmp_path) == [6]


def test_a_rank_that_comes_too_late_raises_the_error_of_the_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    for one, other in zip(*messages(ranks, "one_does_not_come", tmp_path), strict=True):
        assert "rank 1 had not begun this save" in one
        assert "0.2 s" in one
        assert "the save of step 2 failed on rank 0" in other
        assert "rank 1 had not begun this save" in other
        assert other.endswith("rank 1 was at the save of step 3")


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lose(file: Path) -> None:
    file.unlink()


def add(file: Path) -> None:
    (file.parent / "__7_0.distcp").write_bytes(b"of a rank that is not there")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lose, "lacks __0_0.distcp, which a rank has reported as written"),
        (shorten, r"__0_0.distcp: \d+ bytes instead of \d+"),
        (add, "has __7_0.distcp, which no rank has reported as written"),
    ],
)
def test_a_commit_looks_whether_all_files_are_there(
    change: Callable[[Path], None], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = Plan(tmp_path / "plan").use(monkeypatch), tmp_path / "c"
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        plan.set({"op": "sync", "when": "after", "do": "wait"})  # all files are written
        gate = plan.gate()
        handle = checkpointer.save(2, state_of(2))
        gate.arrived()
        (file,) = folder.glob(".tmp-step-00000002-*/__0_0.distcp")
        change(file)
        plan.set()
        gate.open()
        with pytest.raises(CheckpointError, match=f"rank 0 could not commit it: .*{wrong}"):
            handle.wait(NET)
        assert valid_steps(folder) == [1]
        checkpointer.save(3, state_of(3)).wait(NET)
    assert valid_steps(folder) == [1, 3]
    assert left_over(folder) == []
    assert restored(folder) == 3


@pytest.mark.parametrize("url", ["{path}", "memory://{name}"])
def test_the_sizes_of_a_folder(url: str, tmp_path: Path) -> None:
    from outlast.async_checkpoint.storage.directory import open_storage

    storage: Any = open_storage(url.format(path=tmp_path / "s", name=tmp_path.name))
    storage.prepare()
    assert storage.sizes("none") == {}
    storage.make("f")
    for name, content in (("one", b"1"), ("three", b"123"), ("empty", b"")):
        storage.put("f", name, content)
    assert storage.sizes("f") == {"one": 1, "three": 3, "empty": 0}
