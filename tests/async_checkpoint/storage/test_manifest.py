"""A manifest is accepted only if it is, byte for byte, as written."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_checkpoint.storage.manifests import empty, forged, manifests
from outlast.async_checkpoint.storage import manifest as manifest_module
from outlast.async_checkpoint.storage.entries import (
    ITEM_BYTES,
    Contents,
    FileEntry,
    Shard,
    TensorEntry,
    ValueEntry,
    is_covered,
)
from outlast.async_checkpoint.storage.manifest import (
    FORMAT_VERSION,
    Manifest,
    checksum,
    decode,
    encode,
)
from outlast.errors import CheckpointError, CheckpointMismatch


@given(manifests())
def test_what_is_read_is_what_was_written(manifest: Manifest) -> None:
    assert decode(encode(manifest), "here") == manifest


@given(manifests(), st.data())
def test_any_flipped_byte_is_seen(manifest: Manifest, data: st.DataObject) -> None:
    content = bytearray(encode(manifest))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match="here"):
        decode(bytes(content), "here")


def test_every_flipped_bit_of_a_manifest_is_seen() -> None:
    content = encode(WHOLE)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="here") as caught:
            decode(bytes(flipped), "here")
        assert not isinstance(caught.value, CheckpointMismatch)  # not taken for a later format


@given(manifests(), st.data())
def test_any_truncation_is_seen(manifest: Manifest, data: st.DataObject) -> None:
    content = encode(manifest)
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(CheckpointError, match="here"):
        decode(content[:cut], "here")


@given(manifests(), st.binary(min_size=1))
def test_anything_behind_it_is_seen(manifest: Manifest, more: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(encode(manifest) + more, "here")


@given(st.binary(max_size=200))
def test_noise_is_no_manifest(noise: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(noise, "here")


PLAIN = empty(3, "aa")
SUMS = [checksum(b"")] * 3
WHOLE = Manifest(
    step=3,
    save_id="aa",
    world_size=2,
    metric=0.5,
    chunk_bytes=1000,
    files={"f": FileEntry("f", 3000, SUMS), "v": FileEntry("v", 10, SUMS[:1])},
    tensors={
        "m.w": TensorEntry(
            ["m", "w"],
            "float32",
            [4, 6],
            [Shard([0, 0], [4, 3], "f", 64), Shard([0, 3], [4, 3], "f", 128)],
        ),
        "l.0": TensorEntry(["l", [0]], "int64", [], [Shard([], [], "f", 512)]),
    },
    values={"l.1": ValueEntry(["l", [1]], "v", 0, 10)},
)


def test_a_later_format_is_refused_and_an_update_asked_for() -> None:
    content = forged(PLAIN, {"version": FORMAT_VERSION + 1}, b"of any kind")
    with pytest.raises(CheckpointMismatch, match=f"format {FORMAT_VERSION + 1}.*update"):
        decode(content, "here")


@pytest.mark.parametrize("head", [{"format": "else"}, {"version": "1"}, {"version": None}])
def test_another_head_is_refused(head: dict[str, Any]) -> None:
    body = json.dumps(msgspec.to_builtins(PLAIN)).encode()
    assert decode(forged(PLAIN, {}, body), "here") == PLAIN
    with pytest.raises(CheckpointError, match="no manifest"):
        decode(forged(PLAIN, head, body), "here")


def test_a_head_without_its_checksum_is_refused() -> None:
    body = json.dumps(msgspec.to_builtins(WHOLE)).encode()
    for version, sealed in ((1, True), (2, False), (0, False), (3, False), (True, False)):
        with pytest.raises(CheckpointError, match="no manifest"):
            decode(forged(WHOLE, {"version": version}, body, sealed=sealed), "here")


def test_the_table_of_dtypes_is_that_of_torch() -> None:
    found = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    sizes = {str(each).removeprefix("torch."): each.itemsize for each in found}
    # torch.save has none for integers of fewer than eight bits.
    other = re.compile(r"q|bits|u?int[1-7]$")
    assert ITEM_BYTES.keys() >= {name for name in sizes if not other.match(name)}
    assert {name: ITEM_BYTES[name] for name in ITEM_BYTES if name in sizes} == {
        name: size for name, size in sizes.items() if name in ITEM_BYTES
    }


def test_pythons_parser_reads_only_what_was_not_written_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects: list[Any] = []

    def counted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        objects.append(pairs)
        return dict(pairs)

    monkeypatch.setattr(manifest_module, "_unique", counted)
    assert decode(encode(WHOLE), "here") == WHOLE
    assert len(objects) == 1  # the first line
    named = msgspec.structs.replace(WHOLE, save_id="é", metric=None)
    body = json.dumps(msgspec.to_builtins(named)).encode()  # of an earlier version
    assert decode(forged(named, {}, body), "here") == named
    assert len(objects) > 2


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf, 0.1, 1 << 70])
def test_any_metric_is_kept(metric: float) -> None:
    content = encode(msgspec.structs.replace(WHOLE, metric=metric))
    assert repr(decode(content, "here").metric) == repr(metric)


@pytest.mark.parametrize("field", ["save_id", "m.w", "dtype", "at"])
def test_a_key_that_occurs_twice_is_refused(field: str) -> None:
    _, _, body = encode(WHOLE).partition(b"\n")
    key = f'"{field}":'.encode()
    at = body.index(key) + len(key)
    _, end = json.JSONDecoder().raw_decode(body[at:].decode())
    twice = body[: at + end] + b"," + key + body[at : at + end] + body[at + end :]
    with pytest.raises(CheckpointError, match="a key occurs twice"):
        decode(forged(WHOLE, {}, twice), "here")


HUGE = 1 << 61
PATH = ("tensors", "m.w")
SHARD = (*PATH, "shards", 0)


def empty_file(name: str) -> tuple[tuple[Any, ...], Any]:
    return ("files", name), {"name": name, "size_bytes": 0, "checksums": []}


def value_at(*path: Any) -> tuple[tuple[Any, ...], Any]:
    """A value without bytes."""
    name = ".".join(str(key[0] if isinstance(key, list) else key) for key in path)
    return ("values", name), {"path": list(path), "file": "v", "at": 0, "size_bytes": 0}


LIES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a hole": ((*PATH, "shards", 1, "sizes"), [4, 2]),
    "an overlap": ((*PATH, "shards", 1, "offsets"), [0, 2]),
    "a part beyond the shape": ((*PATH, "shards", 1, "offsets"), [0, 4]),
    "no parts": ((*PATH, "shards"), []),
    "a negative offset": ((*SHARD, "offsets"), [-1, 0]),
    "a negative place": ((*SHARD, "at"), -64),
    "the same bytes twice": ((*SHARD, "at"), 128),
    "beyond the file": ((*SHARD, "at"), 2990),
    "far beyond the file": ((*SHARD, "at"), HUGE),
    "a huge shape": ((*PATH, "shape"), [HUGE, HUGE]),
    "a huger shape": ((*PATH, "shape"), [10**4000, 6]),
    "many dimensions": ((*PATH, "shape"), [1] * 65),
    "a fractional size": ((*SHARD, "sizes"), [4.0, 3]),
    "a size that is no number": ((*SHARD, "sizes"), [math.nan, 3]),
    "infinite": ((*SHARD, "at"), math.inf),
    "true for one": ((*SHARD, "offsets"), [False, 0]),
    "text for a number": ((*SHARD, "at"), "64"),
    "other dimensions": ((*SHARD, "sizes"), [12]),
    "another dtype": ((*PATH, "dtype"), "float64"),
    "no dtype": ((*PATH, "dtype"), "load"),
    "a dtype that is a list": ((*PATH, "dtype"), []),
    "a file that is not there": ((*SHARD, "file"), "g"),
    "a path out of the folder": empty_file("../f"),
    "an absolute path": empty_file("/f"),
    "the folder itself": empty_file("."),
    "a zero byte": empty_file("a\0"),
    "half a character": empty_file("\ud800"),
    "a long name": empty_file("a" * 256),
    "itself": empty_file("manifest.json"),
    "another name": (("files", "f", "name"), "v"),
    "a huge file": (("files", "f", "size_bytes"), HUGE),
    "a smaller file": (("files", "f", "size_bytes"), 2000),
    "a negative file": (("files", "f", "size_bytes"), -1),
    "too few checksums": (("files", "f", "checksums"), SUMS[:2]),
    "too many checksums": (("files", "f", "checksums"), SUMS * 2),
    "no checksum": (("files", "f", "checksums"), ["", "", ""]),
    "checksums that are numbers": (("files", "f", "checksums"), [1, 2, 3]),
    "one more field": ((*PATH, "more"), 1),
    "a tensor that is a list": (PATH, []),
    "tensors that are a list": (("tensors",), []),
    "no tensors": (("tensors",), None),
    "a path of another name": ((*PATH, "path"), ["m", "x"]),
    "a path that is no list": ((*PATH, "path"), "m.w"),
    "an empty path": ((*PATH, "path"), []),
    "a deep index": (("tensors", "l.0", "path"), ["l", [[0]]]),
    "a list and a dict": (("tensors", "l.0", "path"), ["l", 0]),
    "a negative index": value_at("l", [-1]),
    "a huge index": value_at("l", [999999999]),
    "a value in a tensor": value_at("m", "w", "x"),
    "a value and a tensor": value_at("m", "w"),
    "a value around a tensor": value_at("m"),
    "a value beyond its file": (("values", "l.1", "size_bytes"), 11),
    "a huge value": (("values", "l.1", "size_bytes"), HUGE),
    "a huge chunk": (("chunk_bytes",), 1 << 30),
    "no chunk": (("chunk_bytes",), 0),
    "a step that is text": (("step",), "3"),
    "another step": (("step",), 4),
    "another save": (("save_id",), "bb"),
    "no rank": (("world_size",), 0),
    "a metric that is text": (("metric",), "good"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_is_checked_before_it_is_believed(lie: str) -> None:
    place, value = LIES[lie]
    values = msgspec.to_builtins(WHOLE)
    at: Any = values
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(CheckpointError, match=r"^here is not valid: "):
        decode(forged(WHOLE, {}, json.dumps(values).encode()), "here")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b"null",
        b"{",
        b'{"files": 3}',
        b"[" * 100_000,
        b'{"step":1,"step":1}',
        b"\xff\xfe",
        json.dumps({**msgspec.to_builtins(PLAIN), "more": 1}).encode(),
        json.dumps(msgspec.to_builtins(PLAIN))
        .encode()
        .replace(b'"step": 3', b'"step": ' + b"9" * 5000),
    ],
)
def test_a_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^here is not valid: "):
        decode(forged(PLAIN, {}, body), "here")


boxes = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.integers(0, 4), st.integers(0, 4)),
    ),
    max_size=6,
)


@given(boxes)
def test_covered_exactly_once_is_what_a_count_of_elements_says(
    parts: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    seen = [
        (row, column)
        for (top, left), (height, width) in parts
        for row in range(top, top + height)
        for column in range(left, left + width)
    ]
    within = [(o, n) for o, n in parts if all(a + b <= 4 for a, b in zip(o, n, strict=True))]
    expected = sorted(seen) == [(row, column) for row in range(4) for column in range(4)]
    assert is_covered([4, 4], parts) == expected or within != parts


def test_parts_that_no_cut_separates() -> None:
    around = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    assert is_covered([3, 3], around)
    assert not is_covered([3, 3], [*around[:4], ((0, 1), (1, 1))])


@pytest.mark.slow
def test_many_parts_take_little_time() -> None:
    """Quadratic work on a million parts would take hours: the limit of the test run is the net."""
    side = 300
    grid = [((row, column), (1, 1)) for row in range(side) for column in range(side)]
    assert is_covered([side, side], grid)
    assert not is_covered([side, side], [*grid[:-1], grid[0]])
    steps = [((i, i), (2, 2)) for i in range(100_000)]
    assert not is_covered([400_000], [((i[0][0],), (4,)) for i in steps])
    shards = [Shard([i], [2], "f", 4 * i) for i in range(100_000)]
    with pytest.raises(ValueError, match="cover"):
        Contents(
            {"f": FileEntry("f", 1 << 40, [""])},
            {"t": TensorEntry(["t"], "float32", [200_000], shards)},
            {},
        ).check(1 << 40)
