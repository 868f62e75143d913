"""The checkpoints of one folder that Lightning saves into: threads, full disks, what is deleted."""

from __future__ import annotations

import itertools
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.errors import CheckpointError

pytest.importorskip("lightning", reason="make test-ports")
from outlast.integrations.lightning import BackgroundCheckpointIO, checkpoint_folder
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
    block(tmp_path / "taken.ckpt")
    save(folder, tmp_path / "taken.ckpt", 1)
    folder._checkpointer.close()
    with pytest.raises(CheckpointError, match=r"taken.ckpt could not be written, although"):
        save(folder, tmp_path / "next.ckpt", 2)
    assert not list(tmp_path.glob("*.partial"))


def test_the_checkpoint_before_is_kept_until_the_new_one_is_named(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    """As with `save_top_k=1`: the earlier one is removed right after the save of the next."""
    save(folder, tmp_path / "first.ckpt", 1)
    folder._checkpointer.wait()
    block(tmp_path / "second.ckpt")
    save(folder, tmp_path / "second.ckpt", 2)
    folder.remove(tmp_path / "first.ckpt")
    with pytest.raises(CheckpointError, match=r"second.ckpt could not be written, although"):
        folder.close(None)
    assert load(tmp_path, "first.ckpt") == [1] * 4


def test_a_failed_save_neither_names_nor_removes_a_checkpoint(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    """Even once its error has been raised."""
    save(folder, tmp_path / "first.ckpt", 1)
    folder._checkpointer.wait()
    writer = folder._checkpointer.session.writer.pid
    assert writer is not None
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (0, 0))  # it can write no more
    save(folder, tmp_path / "second.ckpt", 2)
    with pytest.raises(CheckpointError, match="File too large"):
        folder._checkpointer.wait()
    folder.remove(tmp_path / "first.ckpt")
    folder.close(SystemExit)
    assert not (tmp_path / "second.ckpt").exists()
    assert load(tmp_path, "first.ckpt") == [1] * 4


class Custom:
    """An object that no load allows by default."""


def test_objects_are_loaded_only_where_the_caller_says_so(tmp_path: Path) -> None:
    checkpoints = BackgroundCheckpointIO()
    path = tmp_path / "one.ckpt"
    checkpoints.save_checkpoint({"custom": Custom()}, path)
    checkpoints.teardown()
    with pytest.raises(CheckpointError, match=r"one\.ckpt cannot be loaded.*weights_only=False"):
        checkpoints.load_checkpoint(path)
    assert isinstance(checkpoints.load_checkpoint(path, weights_only=False)["custom"], Custom)
    checkpoints.teardown()


def test_an_error_of_one_folder_leaves_no_other_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    state = {"state_dict": {"weight": torch.ones(4)}}
    for kind in (None, KeyError):
        checkpoints = BackgroundCheckpointIO()
        for place in (one, two):
            block(place / "taken.ckpt")
            checkpoints.save_checkpoint(state, place / "taken.ckpt")
        if kind is None:
            with pytest.raises(CheckpointError, match=r"one/taken.ckpt could not be written"):
                checkpoints.teardown()
        else:
            try:
                raise kind
            except kind:
                checkpoints.teardown()
            assert "two/taken.ckpt could not be written" in caplog.text


def block(path: Path) -> None:
    """Makes `path` a folder, which no file can replace."""
    path.mkdir(parents=True, exist_ok=True)
