"""The checkpoints of one folder that Lightning saves into: threads, full disks, what is deleted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.errors import CheckpointError

pytest.importorskip("lightning", reason="make test-ports")
from outlast.integrations.lightning import checkpoint_folder
from outlast.integrations.lightning.checkpoint_folder import CheckpointFolder, _point

pytestmark = pytest.mark.slow  # as the other tests that need the frameworks

NET_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    opened = CheckpointFolder(tmp_path, {})
    yield opened
    opened.close(SystemExit)


def save(folder: CheckpointFolder, path: Path, value: int) -> None:
    folder.save({"state_dict": {"weight": torch.full((4,), value)}}, path)


def load(path: Path, name: str) -> list[int]:
    folder = CheckpointFolder(path, {})
    loaded = folder.load(path / name, weights_only=True)
    folder.close(None)
    values: list[int] = loaded["state_dict"]["weight"].tolist()
    return values


def test_pointers_are_replaced_and_removed_while_others_are_read(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    """As by the thread of the saves: a pointer that is listed may be gone when it is opened."""
    stopped = threading.Event()

    def replace_and_remove() -> None:
        for number in itertools.count(1000):
            _point(tmp_path / "other.ckpt", number)
            (tmp_path / "other.ckpt").unlink()
            if stopped.is_set():
                return

    thread = threading.Thread(target=replace_and_remove)
    thread.start()
    try:
        for value in range(100):
            save(folder, tmp_path / "last.ckpt", value)
    finally:
        stopped.set()
        thread.join()
    folder.close(None)
    assert load(tmp_path, "last.ckpt") == [99] * 4


def test_a_checkpoint_is_kept_until_its_pointer_is_written(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save begins, and deletes what no pointer names, before the disk has the pointer."""
    begun, may_write = threading.Event(), threading.Event()

    def point_later(path: Path, number: int) -> None:
        begun.set()
        assert may_write.wait(NET_S)
        _point(path, number)

    monkeypatch.setattr(checkpoint_folder, "_point", point_later)
    save(folder, tmp_path / "first.ckpt", 1)
    assert begun.wait(NET_S)
    save(folder, tmp_path / "second.ckpt", 2)
    may_write.set()
    folder.close(None)
    for value, name in enumerate(["first.ckpt", "second.ckpt"], start=1):
        assert load(tmp_path, name) == [value] * 4


def test_a_pointer_that_cannot_be_written_fails_the_next_save(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    (tmp_path / "taken.ckpt").mkdir()
    save(folder, tmp_path / "taken.ckpt", 1)
    folder._checkpointer.close()
    with pytest.raises(CheckpointError, match=r"could not be named: .*taken.ckpt"):
        save(folder, tmp_path / "next.ckpt", 2)


def test_the_end_raises_what_no_later_save_has_raised(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    (tmp_path / "taken.ckpt").mkdir()
    save(folder, tmp_path / "taken.ckpt", 1)
    with pytest.raises(CheckpointError, match=r"could not be named: .*taken.ckpt"):
        folder.close(None)
