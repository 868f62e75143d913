"""The manifest of a checkpoint: its files, tensors and values, and their checksums.

It is the last file of a save, so a directory without one is not a checkpoint. Its first line has
the length and the checksum of the rest, and its own checksum. The rest is JSON: the step, the id of
the save, each file with its size and the xxh3 (128 bit) checksum of every `CHUNK_BYTES` of it, and
where in the files each tensor and each value is. A load therefore needs no pickle to find anything,
and a rank that reads one shard verifies the chunks of that shard only.

A checksum shows damage, not a mistake of the program that wrote it: `entries.py` checks what the
manifest says before anything is allocated or read for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Annotated, Any

import msgspec
import xxhash

from outlast.async_checkpoint.storage.entries import Contents, Count, is_count, to_json
from outlast.async_checkpoint.storage.protocol import FileReader, Storage, read_bytes
from outlast.async_checkpoint.storage.system_errors import reading
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError

MANIFEST = "manifest.json"
FORMAT = "outlast-checkpoint"
FORMAT_VERSION = 3
_OLDEST_READ = 2  # without the order of entries, and containers
HEAD_BYTES = 4096
"""The first line has at most this size."""
# A million shards take about 100 MB. A save refuses more, so a larger file is no manifest.
LARGEST_BYTES = 1 << 30

# The unit that is written, read and checksummed: large enough that a disk runs at full speed with
# a few in flight, small enough to stay in a core's cache between copy and hash, and to locate a
# damaged byte.
CHUNK_BYTES = 4 << 20
_SEAL = b', "line_xxh3_128": "'


def checksum(data: bytes | memoryview) -> str:
    """xxh3 of 128 bits, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


Sections = Callable[[int], Iterable[memoryview]]  # of at most so many bytes, filled in turn


def read_hashed(reader: FileReader, offset: int, sections: Sections) -> tuple[int, str]:
    """Fills the sections from `offset`; returns how many bytes there were, and their checksum."""
    digest = xxhash.xxh3_128()
    got = 0
    for section in sections(reader.at_once):
        count = reader.read_into(offset + got, section)
        got += count
        if count < len(section):
            break  # the file is truncated
        digest.update(section)
    return got, digest.hexdigest()


def sections_of(buffer: memoryview, at_once: int) -> Iterator[memoryview]:
    """A buffer, as `Sections`."""
    return (buffer[at : at + at_once] for at in range(0, len(buffer), at_once))


def pieces(size_bytes: int, piece_bytes: int = CHUNK_BYTES) -> Sequence[tuple[int, int]]:
    """Offset and length of each piece that `size_bytes` are cut into."""
    return [(at, min(piece_bytes, size_bytes - at)) for at in range(0, size_bytes, piece_bytes)]


class Manifest(Contents, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of one checkpoint. `save_id` is unique to the save; each checksum covers
    `chunk_bytes`. `non_finite` are those tensors that must be finite and are not, if known.
    """

    step: Count
    save_id: str
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    metric: int | float | None
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)]
    non_finite: list[str] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Head(msgspec.Struct, frozen=True):
    """The first line of a manifest; the rest has `body_bytes` and this `checksum`."""

    step: int
    save_id: str
    body_bytes: int
    checksum: str


def encode(manifest: Manifest) -> bytes:
    """The content of the manifest file; a `CheckpointError` if no load would read so much."""
    if math.isfinite(manifest.metric or 0):
        body = to_json(manifest)
    else:  # which msgspec writes as null
        fields = msgspec.structs.asdict
        body = json.dumps(manifest, separators=(",", ":"), default=fields).encode()
    if len(body) + HEAD_BYTES > LARGEST_BYTES:
        raise CheckpointError(
            f"the manifest of step {manifest.step} would have {len(body)} bytes, more than the "
            f"{LARGEST_BYTES} that a restore reads: save fewer tensors, or larger shards"
        )
    line = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "step": manifest.step,
            "bytes": len(body),
            "xxh3_128": checksum(body),
            "save_id": manifest.save_id,
        }
    ).encode()
    return line[:-1] + _SEAL + checksum(line).encode() + b'"}\n' + body


def decode(content: bytes, where: str) -> Manifest:
    """Returns the manifest from the content of its file, which errors call `where`. A
    `CheckpointMismatch` if it is of a later format. A `CheckpointError` if it is truncated or
    damaged, or says what cannot be true.
    """
    head = decode_head(content, where)
    _, _, body = content.partition(b"\n")
    if len(body) != head.body_bytes or checksum(body) != head.checksum:
        raise CheckpointError(f"{where} is damaged: its checksum does not match")
    try:
        manifest = _convert(body)
        if MANIFEST in manifest.files:
            raise ValueError("it lists itself as a file")
        if (manifest.step, manifest.save_id) != (head.step, head.save_id):
            raise ValueError("its first line is that of another manifest")
        manifest.check(manifest.chunk_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{where} is not valid: {e}") from e
    return manifest


def _convert(body: bytes) -> Manifest:
    """Python's parser calls `_unique` for each object: a second for 40,000 tensors."""
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode(body, type=Manifest)
        if to_json(found) == body:  # so no key occurs twice
            return found
    return msgspec.convert(json.loads(body, object_pairs_hook=_unique), Manifest)


def decode_head(content: bytes, where: str) -> Head:
    """The first line of a manifest, of which `content` is the beginning. Raises as `decode`."""
    found = _head(content)
    if found is None:
        raise CheckpointError(
            f"{where} is no manifest of a checkpoint, or its beginning is damaged"
        )
    if found["version"] > FORMAT_VERSION:
        raise CheckpointMismatch(
            f"{where} has format {found['version']}, and this version of outlast reads up to "
            f"{FORMAT_VERSION}: update outlast, or restore an older step by its number"
        )
    names = ("step", "save_id", "bytes", "xxh3_128")
    head = Head(*map(found.get, names))  # type: ignore[arg-type]  # next
    if not (is_count(head.step) and is_count(head.body_bytes) and isinstance(head.save_id, str)):
        raise CheckpointError(f"{where} is not valid: its first line is {found}")
    return head


def check_written(storage: Storage, folder: str, files: Mapping[str, int]) -> None:
    """Checks before a commit that a directory has these files, of these sizes, and no others. A
    `CheckpointError` if not; names a file and what is wrong with it. A `CheckpointReadError` if
    that cannot be read now.
    """
    where = f"{storage.where}/{folder}"
    found = reading(where, lambda: storage.sizes(folder))
    for name in sorted(files.keys() | found.keys()):
        if name not in found:
            raise CheckpointError(
                f"{where} lacks {name}, which a rank has reported as written: all ranks have to "
                "give the same folder, on storage that they share"
            )
        if name not in files:
            raise CheckpointError(f"{where} has {name}, which no rank has reported as written")
        if found[name] != files[name]:
            raise CheckpointError(f"{where}/{name}: {found[name]} bytes instead of {files[name]}")


def saved_by(storage: Storage, folder: str) -> str:
    """The id of the save of a checkpoint; empty if damaged or missing. May raise as `reading`."""

    def read() -> bytes:
        with closing(storage.open(folder, MANIFEST)) as reader:
            return read_bytes(reader, 0, HEAD_BYTES)

    where = f"{storage.where}/{folder}/{MANIFEST}"
    try:
        return decode_head(reading(where, read), where).save_id
    except CheckpointReadError:
        raise
    except CheckpointError:
        return ""


def _head(content: bytes) -> dict[str, Any] | None:
    """The first line, if it is from this library and intact."""
    line = content[:HEAD_BYTES].partition(b"\n")[0]
    text, _, seal = line.rpartition(_SEAL)
    line = text + b"}"
    if seal != checksum(line).encode() + b'"}':
        return None
    try:
        found = json.loads(line, object_pairs_hook=_unique)
        if found["format"] != FORMAT or type(found["version"]) is not int:
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(found) if found["version"] >= _OLDEST_READ else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
