"""Manifests for tests: valid ones of any content, and forged ones with correct checksums."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from outlast.async_checkpoint.storage.entries import (
    ITEM_BYTES,
    FileEntry,
    Shard,
    TensorEntry,
    ValueEntry,
)
from outlast.async_checkpoint.storage.manifest import Manifest, checksum, encode, pieces

FILE = "__0_0.distcp"


def empty(step: int, save_id: str) -> Manifest:
    """A manifest without files."""
    return Manifest(
        step=step,
        save_id=save_id,
        world_size=1,
        metric=None,
        chunk_bytes=4 << 20,
        files={},
        tensors={},
        values={},
    )


def cut(shape: list[int], parts: int) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the shards of a tensor that is cut along its first dimension, as torch
    cuts it: the last ones may be empty.
    """
    if not shape:
        return [([], [])]
    rows = -(-shape[0] // parts)
    found = []
    for part in range(parts):
        begin, end = min(part * rows, shape[0]), min((part + 1) * rows, shape[0])
        found.append(([begin, *[0] * (len(shape) - 1)], [end - begin, *shape[1:]]))
    return found


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any valid manifest of one file."""
    at = draw(st.integers(0, 99))
    tensors, values = {}, {}
    chunk_bytes = draw(st.integers(100, 1 << 20))
    names = draw(st.lists(st.text(max_size=9).filter(lambda n: "." not in n), unique=True))
    for name in names:
        if draw(st.booleans()):
            size = draw(st.integers(0, 500))
            values[name] = ValueEntry([name], FILE, at, size)
            at += size
            continue
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape, shards = draw(st.lists(st.integers(0, 9), max_size=3)), []
        for offsets, sizes in cut(shape, draw(st.integers(1, 4))):
            shards.append(Shard(offsets, sizes, FILE, at))
            volume = ITEM_BYTES[dtype]
            for size in sizes:
                volume *= size
            at += volume + draw(st.integers(0, 9))
        tensors[name] = TensorEntry([name], dtype, shape, shards)
    file = FileEntry(FILE, at, [checksum(b"x")] * len(pieces(at, chunk_bytes)))
    return Manifest(
        step=draw(st.integers(0, 1 << 61)),
        save_id=draw(st.text(max_size=12)),
        world_size=draw(st.integers(1, 10**6)),
        metric=draw(st.none() | st.floats(allow_nan=False)),
        chunk_bytes=chunk_bytes,
        files={FILE: file},
        tensors=tensors,
        values=values,
    )


def forged(manifest: Manifest, head: dict[str, Any], body: bytes, *, sealed: bool = True) -> bytes:
    """A manifest with this body, changes to its first line, and correct checksums."""
    known = json.loads(encode(manifest).partition(b"\n")[0])
    known.pop("line_xxh3_128")
    known.update({"bytes": len(body), "xxh3_128": checksum(body)}, **head)
    line = json.dumps(known).encode()
    if sealed:
        line = line[:-1] + b', "line_xxh3_128": "' + checksum(line).encode() + b'"}'
    return line + b"\n" + body
