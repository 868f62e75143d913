"""A manifest is accepted only if it is, byte for byte, as written."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.async_checkpoint.storage.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    Shard,
    TensorEntry,
    ValueEntry,
    checksum,
    decode,
    encode,
)
from outlast.errors import CheckpointError

sizes = st.integers(0, 2**62)
names = st.text(max_size=12)
shapes = st.lists(sizes, max_size=4)
paths = st.lists(names | st.integers() | st.lists(st.integers(0, 99), min_size=1, max_size=1))
files = st.builds(FileEntry, names, sizes, st.lists(st.text("0123456789abcdef", max_size=32)))
shards = st.builds(Shard, shapes, shapes, names, sizes)
tensors = st.builds(TensorEntry, paths, names, shapes, st.lists(shards, max_size=3), sizes)
values = st.builds(ValueEntry, paths, names, sizes, sizes)


def named(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(names, entries, max_size=3)


manifests = st.builds(
    Manifest,
    step=sizes,
    save_id=names,
    world_size=st.integers(1, 10**6),
    metric=st.none() | st.floats(allow_nan=False),
    chunk_bytes=st.integers(1, 2**30),
    files=named(files),
    tensors=named(tensors),
    values=named(values),
)


@given(manifests)
def test_what_is_read_is_what_was_written(manifest: Manifest) -> None:
    assert decode(encode(manifest), "here") == manifest


@given(manifests, st.data())
def test_any_flipped_byte_is_seen(manifest: Manifest, data: st.DataObject) -> None:
    content = bytearray(encode(manifest))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(content), "here")
    except CheckpointError:
        return
    # Only in the first line, in a field that is not used: the step is in the body too.
    assert at < content.index(b"\n")
    assert found == manifest


@given(manifests, st.data())
def test_any_truncation_is_seen(manifest: Manifest, data: st.DataObject) -> None:
    content = encode(manifest)
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(CheckpointError, match="here"):
        decode(content[:cut], "here")


@given(manifests, st.binary(min_size=1))
def test_anything_behind_it_is_seen(manifest: Manifest, more: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(encode(manifest) + more, "here")


@given(st.binary(max_size=200))
def test_noise_is_no_manifest(noise: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(noise, "here")


def rewritten(manifest: Manifest, head: dict[str, Any], body: bytes) -> bytes:
    """With a matching header and checksum."""
    known = json.loads(encode(manifest).partition(b"\n")[0])
    known.update({"bytes": len(body), "xxh3_128": checksum(body)}, **head)
    return json.dumps(known).encode() + b"\n" + body


PLAIN = Manifest(3, "aa", 1, None, 1000, {}, {}, {})


def test_a_later_format_is_refused_and_an_update_asked_for() -> None:
    content = rewritten(PLAIN, {"version": FORMAT_VERSION + 1}, b"of any kind")
    with pytest.raises(CheckpointError, match=f"format {FORMAT_VERSION + 1}.*update"):
        decode(content, "here")


@pytest.mark.parametrize("head", [{"format": "else"}, {"version": "1"}, {"version": None}])
def test_another_head_is_refused(head: dict[str, Any]) -> None:
    body = json.dumps(dataclasses.asdict(PLAIN)).encode()
    assert decode(rewritten(PLAIN, {}, body), "here") == PLAIN
    with pytest.raises(CheckpointError, match="no manifest"):
        decode(rewritten(PLAIN, head, body), "here")


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"{", b'{"files": 3}'])
def test_a_body_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(rewritten(PLAIN, {}, body), "here")


def test_a_key_that_this_version_does_not_know_is_refused() -> None:
    body = json.dumps({**dataclasses.asdict(PLAIN), "more": 1}).encode()
    with pytest.raises(CheckpointError, match="here"):
        decode(rewritten(PLAIN, {}, body), "here")
