"""The checksum of a tensor is that of its values, however they are distributed over files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_checkpoint import made
from outlast.async_checkpoint.inspection import tensor_checksums
from outlast.async_checkpoint.storage.entries import Shard, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.chaos.storage import flip_byte
from outlast.errors import CheckpointError

VALUES = np.arange(24, dtype=np.int32).reshape(4, 6)


def checksums(folder: Path, files: dict[str, bytes], *shards: Shard) -> dict[str, str]:
    storage = LocalStorage(folder)
    tensors = {
        "weight": TensorEntry(["weight"], "int32", [4, 6], list(shards)),
        "count": TensorEntry(["count"], "int64", [], [Shard([], [], "first", 0)]),
    }
    return tensor_checksums(storage, made.save(storage, 1, files, tensors=tensors))


def whole(folder: Path, values: np.ndarray = VALUES, count: bytes = b"\1" * 8) -> dict[str, str]:
    files = {"first": count + values.tobytes()}
    return checksums(folder, files, Shard([0, 0], [4, 6], "first", 8))


def test_the_distribution_over_files_does_not_matter(tmp_path: Path) -> None:
    files = {
        "first": b"\1" * 8 + VALUES[:, :2].tobytes(),
        "second": VALUES[:1, 2:].tobytes() + VALUES[1:, 2:].tobytes(),
    }
    in_parts = checksums(
        tmp_path / "parts",
        files,
        Shard([1, 2], [3, 4], "second", 16),
        Shard([0, 0], [4, 2], "first", 8),
        Shard([0, 2], [1, 4], "second", 0),
    )
    assert in_parts == whole(tmp_path / "whole")


def test_each_value_matters_to_its_own_tensor(tmp_path: Path) -> None:
    one = whole(tmp_path / "one")
    values = VALUES.copy()
    values[3, 5] += 1
    other = whole(tmp_path / "other", values)
    assert one["count"] == other["count"]
    assert one["weight"] != other["weight"]
    assert whole(tmp_path / "third", count=b"\2" * 8)["count"] != one["count"]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole(tmp_path)
    flip_byte(next(tmp_path.rglob("first")), 20)
    storage = LocalStorage(tmp_path)
    (folder,) = [name for name in storage.folders() if not name.startswith(".")]
    with pytest.raises(CheckpointError, match="first: damaged between bytes 0 and"):
        tensor_checksums(storage, folder)
