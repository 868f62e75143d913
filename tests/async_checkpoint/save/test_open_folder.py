"""A folder is opened in one round of all ranks, where no process is new to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outlast.async_checkpoint.save import open_folder as module
from outlast.async_checkpoint.save.open_folder import open_folder
from outlast.async_checkpoint.storage import local
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import CheckpointError, FolderUnusable

LIMIT_S = 60.0


class Session:
    """Of one rank: `take_over` fails so many times."""

    def __init__(self, folder: Path, failures: int) -> None:
        self.storage: Any = local.LocalStorage(str(folder))
        self.locked, self.identity, self.calls, self._failures = False, "", 0, failures

    def take_over(self) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise CheckpointError("the writer has died")


def opened(
    folder: Path, known: list[bool], failures: tuple[int, int], other: Path | None = None
) -> tuple[list[Any], int]:
    """The sessions, or the errors, of two ranks; and how many rounds they took. Rank 1 may be given
    another folder.
    """
    store = MemoryStore()
    folders = folder, other or folder
    sessions: list[Any] = [Session(*each) for each in zip(folders, failures, strict=True)]
    ranks = [Agreement(CallLedger(store, "x", rank, 2), LIMIT_S, "c") for rank in range(2)]

    def on_rank(rank: int) -> Any:
        try:
            open_folder(sessions[rank], ranks[rank], "the test", known=known[rank])
        except FolderUnusable as e:
            return f"unusable: {e}"
        except CheckpointError as e:
            return str(e)
        return sessions[rank]

    try:
        with ThreadPoolExecutor() as threads:
            return list(threads.map(on_rank, range(2))), ranks[0]._steps
    finally:
        sessions[0].storage.close()
        sessions[1].storage.close()


@pytest.mark.parametrize(
    ("known", "failures", "calls", "rounds"),
    [
        ([True, True], (0, 0), [1, 1], 1),
        ([True, False], (0, 0), [1, 1], 2),  # a process that has replaced one that was killed
        ([False, False], (0, 0), [1, 1], 2),
        ([True, True], (0, 1), [1, 2], 2),
    ],
)
def test_the_rounds_in_which_a_folder_is_opened(
    tmp_path: Path,
    known: list[bool],
    failures: tuple[int, int],
    calls: list[int],
    rounds: int,
) -> None:
    sessions, taken = opened(tmp_path, known, failures)
    assert [each.calls for each in sessions] == calls
    assert sessions[0].identity == sessions[1].identity != ""
    assert taken == rounds


def test_all_ranks_learn_what_one_cannot_take_over(tmp_path: Path) -> None:
    errors, _ = opened(tmp_path, [True, True], (0, 2))
    assert all("the writer has died" in each and "rank 1" in each for each in errors)


@pytest.mark.parametrize("made", [False, True])
def test_two_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, made: bool
) -> None:
    """As where the name of the folder has the time at which each process began."""
    monkeypatch.setattr(module, "_SEEN_S", 0.1)
    if made:
        (tmp_path / "b").mkdir()
    errors, _ = opened(tmp_path / "a", [False, False], (0, 0), tmp_path / "b")
    for each in errors:
        assert each.startswith("unusable: "), each
        assert "rank 1 on " in each
        assert f"saves into {tmp_path}/b, and rank 0 on " in each
        assert f"into {tmp_path}/a: all ranks have to give the same folder" in each
    assert not made or not list((tmp_path / "b").iterdir())


def test_one_folder_may_have_two_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    sessions, _ = opened(tmp_path / "a", [False, False], (0, 0), tmp_path / "b")
    assert sessions[0].identity == sessions[1].identity != ""
