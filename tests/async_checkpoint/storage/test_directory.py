"""Finding checkpoints in a folder, whatever else it contains."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from async_checkpoint.made import save
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage import system_errors
from outlast.async_checkpoint.storage.entries import FileEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import MANIFEST, decode, encode
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.errors import CheckpointError, CheckpointReadError

FILE = "__0_0.distcp"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_nothing_is_there(storage: LocalStorage) -> None:
    assert folders.candidates(storage) == []
    assert folders.list_checkpoints(storage) == []
    assert folders.leftovers(storage) == []
    assert folders.survey(storage) == []
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[\]"):
        folders.verify(storage, 3)


def test_what_is_there_by_step(storage: LocalStorage) -> None:
    for step in (100_000_000, 9, 20):
        save(storage, step, metric=step / 2)
    for name in ("other", "step-", "step-1x", ".tmp-step-00000005-aa"):
        (storage.root / name).mkdir()
    (storage.root / "step-00000007").write_text("a file")
    assert [step for step, _ in folders.candidates(storage)] == [100_000_000, 20, 9]
    found = folders.list_checkpoints(storage)
    assert [(one.step, one.metric) for one in found] == [(9, 4.5), (20, 10.0), (10**8, 5e7)]
    assert (found[0].size_bytes, found[0].world_size, found[0].tensors) == (2560, 2, 1)
    assert folders.leftovers(storage) == [".tmp-step-00000005-aa"]
    assert [(one.step, one.wrong) for one in folders.survey(storage)] == [
        (9, ""),
        (20, ""),
        (10**8, ""),
        (None, "not committed"),
    ]


def test_directories_that_are_no_checkpoints(storage: LocalStorage) -> None:
    save(storage, 3)
    left = [".tmp-recycled", ".tmp-removed-step-00000001-aa", ".tmp-step-00000005-aa"]
    for name in (*left, "states-00000009"):
        storage.make(name)
    assert folders.candidates(storage) == [(3, "step-00000003")]
    assert folders.leftovers(storage) == left
    assert [one.folder for one in folders.survey(storage)] == ["step-00000003", *left]


def test_a_directory_that_cannot_be_read_now(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    save(remote, 3)

    def refuse(self: RemoteStorage, folder: str, name: str) -> int:
        raise PermissionError(13, "no")

    monkeypatch.setattr(RemoteStorage, "size", refuse)  # root can read everything
    monkeypatch.setattr(system_errors, "_pause", lambda seconds: None)
    with pytest.raises(CheckpointReadError, match="no"):
        folders.candidates(remote)


def test_one_without_a_manifest_is_damaged_and_kept(storage: LocalStorage) -> None:
    folder = save(storage, 3)
    (storage.root / folder / MANIFEST).unlink()
    assert folders.candidates(storage) == [(3, folder)]
    assert folders.list_checkpoints(storage) == []
    assert folders.leftovers(storage) == []
    with pytest.raises(CheckpointError, match="the save was not committed"):
        folders.verify(storage, 3)
    (found,) = folders.survey(storage)
    assert found.step == 3
    assert "is missing" in found.wrong


def test_a_manifest_of_another_step_is_refused(storage: LocalStorage) -> None:
    folder = save(storage, 3)
    os.rename(storage.root / folder, storage.root / "step-00000004")
    with pytest.raises(CheckpointError, match="of another save, of step 3"):
        folders.verify(storage, 4)
    assert folders.list_checkpoints(storage) == []


def test_every_byte_is_looked_at(storage: LocalStorage) -> None:
    folder = save(storage, 3, {FILE: bytes(2500), "empty": b""})
    seen: list[int] = []
    assert folders.verify(storage, 3, seen.append).size_bytes == 2500
    assert seen == [1000, 1000, 500]
    path = storage.root / folder / FILE
    for at, where in ((0, "0 and 1000"), (1999, "1000 and 2000"), (2499, "2000 and 2500")):
        flip(path, at)
        assert folders.survey(storage)[0].wrong == ""
        with pytest.raises(CheckpointError, match=f"{FILE}: damaged between bytes {where}"):
            folders.verify(storage, 3)
        flip(path, at)
    folders.verify(storage, 3)


def test_every_damaged_file_is_named(storage: LocalStorage) -> None:
    folder = save(storage, 3, {name: bytes(1500) for name in "abcde"})
    root = storage.root / folder
    flip(root / "a", 1200)
    (root / "b").unlink()
    (root / "c").write_bytes(bytes(1499))
    (root / "d").unlink()
    (root / "d").symlink_to(root / "e")
    with pytest.raises(CheckpointError) as caught:
        folders.verify(storage, 3)
    wrong = str(caught.value)
    assert "a: damaged between bytes 1000 and 1500" in wrong
    assert "b: No such file or directory" in wrong
    assert "c: 1499 bytes instead of 1500" in wrong
    assert "d: Too many levels of symbolic links" in wrong
    assert "e:" not in wrong
    found = folders.survey(storage)[0].wrong
    assert "b: No such file" in found
    assert "c: 1499 bytes" in found


def test_a_name_that_leads_elsewhere_is_damage(storage: LocalStorage) -> None:
    storage.prepare()
    (storage.root / "outside").write_bytes(b"secret")
    save(storage, 3, {"inside": b"x"})
    manifest = decode(storage.get("step-00000003", MANIFEST), "here")
    manifest.files["../outside"] = FileEntry("../outside", 6, ["0" * 32])
    storage.put("step-00000003", MANIFEST, encode(manifest))
    with pytest.raises(CheckpointError, match="is not a valid file name"):
        folders.verify(storage, 3)


def test_deleted_is_one_step(storage: LocalStorage) -> None:
    save(storage, 3)
    save(storage, 4)
    folders.delete(storage, 3)
    assert storage.folders() == ["step-00000004"]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[4\]"):
        folders.delete(storage, 3)


def test_what_a_manifest_says_is_checked_once(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each restart in place, the newest manifest is read; a change of it is seen even so."""
    for step in (3, 4):
        save(storage, step)
    checked: list[str] = []

    def counted(content: bytes, where: str) -> object:
        checked.append(where)
        return decode(content, where)

    monkeypatch.setattr(folders, "decode", counted)
    found = folders.list_checkpoints(storage)
    assert len(checked) == 2
    assert folders.list_checkpoints(storage) == found
    assert folders.newest_checkpoint(storage) == found[-1]
    assert len(checked) == 2
    manifest = storage.root / "step-00000004" / MANIFEST
    content = manifest.read_bytes()
    flip(manifest, len(content) - 2)
    assert folders.newest_checkpoint(storage) == found[0]
    manifest.write_bytes(content)
    assert folders.newest_checkpoint(storage) == found[1]
    other = LocalStorage(str(storage.root.rename(storage.root.with_name("other"))))
    folders.list_checkpoints(other)
    assert len(checked) == 5, "one that was damaged, and two of another folder"


def test_few_checked_manifests_are_kept(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_MOST_KNOWN", 2)
    for step in range(5):
        save(storage, step)
        assert [one.step for one in folders.list_checkpoints(storage)] == [*range(step + 1)]
        assert len(folders._known) <= 2
