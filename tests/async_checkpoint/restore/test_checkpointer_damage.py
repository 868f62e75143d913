"""C4: a damaged checkpoint is named, skipped, and never loaded."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.checkpoints import (
    blank,
    folder_of,
    restored,
    same,
    save_steps,
    state_of,
    valid_steps,
)
from async_checkpoint.storage.manifests import forged
from inprocess.mutations import mutate
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore import verified_read
from outlast.async_checkpoint.snapshot import structure
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.manifest import FORMAT_VERSION, MANIFEST, decode
from outlast.chaos.storage import flip_byte, truncate
from outlast.errors import CheckpointError, CheckpointMismatch
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointPassedOver, CheckpointRestored


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    save_steps(path, 1, 2)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "c")
    return tmp_path / "c"


def weight_at(folder: Path) -> tuple[str, int]:
    """The location of a tensor's bytes."""
    manifest = decode((folder / MANIFEST).read_bytes(), "here")
    shard = manifest.tensors["model.weight"].shards[0]
    return shard.file, shard.at


def flip_weight(folder: Path) -> None:
    name, at = weight_at(folder)
    flip_byte(folder / name, at + 100)


def flip_framing(folder: Path) -> None:
    name, _ = weight_at(folder)
    flip_byte(folder / name, 3)


def manifest_of_another_save(folder: Path) -> None:
    shutil.copy(folder.with_name("step-00000001") / MANIFEST, folder / MANIFEST)


# The damage to the newest checkpoint, and the expected message.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensor": (flip_weight, r"__0_0\.distcp"),
    "values": (lambda f: flip_byte(f / "__0_values.distcp", 900), r"__0_values\.distcp"),
    "manifest": (lambda f: flip_byte(f / MANIFEST, 400), r"manifest\.json is damaged"),
    "manifest head": (lambda f: flip_byte(f / MANIFEST, 2), r"manifest\.json is no manifest"),
    "cut short": (lambda f: truncate(f / "__0_0.distcp", 4096), r"__0_0\.distcp"),
    "cut to nothing": (lambda f: truncate(f / "__0_0.distcp", 0), r"__0_0\.distcp"),
    "missing": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp: No such file"),
    "no values": (lambda f: (f / "__0_values.distcp").unlink(), "__0_values.distcp: No such"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), r"manifest\.json is missing"),
    "manifest cut": (lambda f: truncate(f / MANIFEST, 400), r"manifest\.json is damaged"),
    "empty manifest": (lambda f: truncate(f / MANIFEST, 0), r"manifest\.json is no manifest"),
    "other manifest": (manifest_of_another_save, "manifest of another save, of step 1"),
}


def error_of(use: Callable[[], object]) -> str:
    """The message of the error that a call raises, or an empty string."""
    try:
        use()
    except CheckpointError as error:
        return str(error)
    return ""


def check_passed_over(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    harm, message = DAMAGE[damage]
    harm(folder_of(path, 2))
    sink = MemorySink()
    with Checkpointer(path, events=sink) as checkpointer:
        assert re.search(message, error_of(lambda: checkpointer.verify(2)))
        assert checkpointer.verify(1).step == 1
        state = blank()
        with caplog.at_level(logging.WARNING, "outlast.checkpoint"):
            assert checkpointer.restore(state) == 1
        assert same(state, state_of(1))
        assert re.search(message, error_of(lambda: checkpointer.restore(blank(), step=2)))
    assert "passed over the checkpoint of step 2" in caplog.text
    passed, loaded, _ = sink.events
    assert isinstance(passed, CheckpointPassedOver)
    assert (passed.step, passed.source) == (2, "storage")
    assert isinstance(loaded, CheckpointRestored)
    assert (loaded.step, loaded.source) == (1, "storage")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_passed_over(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_passed_over(path, damage, caplog)


def check_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, verified_read.is_intact, "checksums[number] == found", "True")


def check_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, folders.read_manifest, "manifest.step != step", "False")


def check_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, decode, "checksum(body) != head.checksum", "False")


def check_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    read = "reader.read(read) != (size, expected)"
    mutate(monkeypatch, folders.verify_folder, read, "reader.read(read)[0] != size")


@pytest.mark.parametrize(
    ("without", "damage"),
    [
        (check_of_chunks, "tensor"),
        (check_of_verify, "tensor"),
        (check_of_the_step, "other manifest"),
        (check_of_the_manifest, "manifest"),
    ],
)
def test_it_is_noticed_when_a_check_is_missing(
    path: Path,
    without: Callable[[pytest.MonkeyPatch], None],
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_passed_over(path, damage, caplog)


def test_metadata_is_verified_and_never_unpickled(path: Path, tmp_path: Path) -> None:
    (folder_of(path, 2) / ".metadata").write_bytes(pickle.dumps(_Malice(tmp_path / "harm")))
    assert restored(path) == 2
    assert not (tmp_path / "harm").exists()
    with Checkpointer(path) as checkpointer, pytest.raises(CheckpointError, match=r"\.metadata"):
        checkpointer.verify(2)


class _Malice:
    """Has side effects when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_values_that_run_code_are_refused_unless_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = tmp_path / "harm"
    with Checkpointer(tmp_path / "c") as checkpointer:
        with pytest.raises(CheckpointError, match=r"'value' cannot be saved: a _Malice could not"):
            checkpointer.save(1, {"value": _Malice(harm)})
        assert not harm.exists()
        monkeypatch.setattr(structure, "encode", lambda value: value)
        checkpointer.save(1, {"value": _Malice(harm)}).wait()
    with Checkpointer(tmp_path / "c") as checkpointer:
        with pytest.raises(CheckpointError, match=r"'value' .* cannot be loaded.*weights_only"):
            checkpointer.restore({"value": None})
        assert not harm.exists()
        assert checkpointer.restore({"value": None}, weights_only=False) == 1
        assert harm.exists()


def test_nothing_unpickled_before_it_is_verified(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, {"value": (1, 2)}).wait()
    values = folder_of(tmp_path / "c", 1) / "__0_values.distcp"
    content = values.read_bytes()
    torch.save(_Malice(tmp_path / "harm"), values)
    values.write_bytes((values.read_bytes() + content)[: len(content)])
    with (
        Checkpointer(tmp_path / "c") as checkpointer,
        pytest.raises(CheckpointError, match=r"__0_values\.distcp is damaged"),
    ):
        checkpointer.restore({"value": None}, weights_only=False)
    assert not (tmp_path / "harm").exists()


def test_bytes_that_nobody_reads_do_no_harm_to_another_part(path: Path) -> None:
    """A chunk is verified as a whole, including the framing of the tensors in it."""
    flip_framing(folder_of(path, 2))
    with Checkpointer(path) as checkpointer, pytest.raises(CheckpointError, match="damaged"):
        checkpointer.verify(2)
    assert restored(path) == 1


def test_with_all_damaged_each_is_named(path: Path) -> None:
    flip_weight(folder_of(path, 1))
    (folder_of(path, 2) / MANIFEST).unlink()
    with Checkpointer(path) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(blank())
        assert [info.step for info in checkpointer.checkpoints()] == [1]
    message = str(error.value)
    assert "no checkpoint in" in message
    assert f"{folder_of(path, 2)}/manifest.json is missing" in message
    assert f"{folder_of(path, 1)}/__0_0.distcp is damaged between bytes" in message
    with pytest.raises(CheckpointError):
        valid_steps(path)


def test_a_later_format_is_neither_guessed_at_nor_passed_over(path: Path) -> None:
    """It may be intact: a step back would overwrite it."""
    manifest = folder_of(path, 2) / MANIFEST
    later = forged(decode(manifest.read_bytes(), ""), {"version": FORMAT_VERSION + 1}, b"later")
    manifest.write_bytes(later)
    says = f"has format {FORMAT_VERSION + 1}"
    with Checkpointer(path) as checkpointer:
        with pytest.raises(CheckpointError, match=says):
            checkpointer.verify(2)
        with pytest.raises(CheckpointMismatch, match=says):
            checkpointer.restore(blank())
    assert restored(path, step=1) == 1
