"""The manifest of a checkpoint: its files, tensors and values, and their checksums.

It is the last file of a save, so a directory without one is not a checkpoint. Its first line has
the length and the checksum of the rest, which is JSON: the step, the id of the save, each file with
its size and the xxh3 (128 bit) checksum of every `CHUNK_BYTES` of it, and where in the files each
tensor and each value is. A load therefore needs no pickle to find anything, and a rank that reads
one shard verifies the chunks of that shard only.

Nothing here imports torch: the command line and the writer process do not need it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import xxhash

from outlast.async_checkpoint.storage.protocol import FileReader, Storage
from outlast.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "outlast-checkpoint"
FORMAT_VERSION = 1
_HEAD_BYTES = 4096

# The unit that is written, read and checksummed: large enough that a disk runs at full speed with
# a few in flight, small enough to stay in a core's cache between copy and hash, and to locate a
# damaged byte.
CHUNK_BYTES = 4 << 20

# Each entry is a key of a dict (text or number), or `[i]` for index i of a list.
Path = list[Any]


def checksum(data: bytes | memoryview) -> str:
    """xxh3 of 128 bits, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def read_hashed(reader: FileReader, offset: int, buffer: memoryview) -> tuple[int, str]:
    """Fills `buffer` from `offset`; returns how many bytes there were, and their checksum."""
    digest = xxhash.xxh3_128()
    got = 0
    while got < len(buffer):
        stretch = buffer[got : got + reader.at_once]
        count = reader.read_into(offset + got, stretch)
        digest.update(stretch[:count])
        got += count
        if count < len(stretch):
            break
    return got, digest.hexdigest()


def pieces(size_bytes: int, piece_bytes: int = CHUNK_BYTES) -> Sequence[tuple[int, int]]:
    """Offset and length of each piece that `size_bytes` are cut into."""
    return [(at, min(piece_bytes, size_bytes - at)) for at in range(0, size_bytes, piece_bytes)]


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file: its name in the directory, its size, the checksum of each `chunk_bytes` of it."""

    name: str
    size_bytes: int
    checksums: list[str]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a tensor: its offsets in the tensor, its shape, and where its bytes are."""

    offsets: list[int]
    sizes: list[int]
    file: str
    at: int


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor: `dtype` without `torch.`, its global shape, and its parts. A sparse or quantized
    tensor has one part: `opaque` bytes that `torch.save` wrote.
    """

    path: Path
    dtype: str
    shape: list[int]
    shards: list[Shard]
    opaque: int = 0


@dataclasses.dataclass(frozen=True)
class ValueEntry:
    """A Python value, as `torch.save` wrote it."""

    path: Path
    file: str
    at: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint: its files, and its tensors and values by their flat names.
    `save_id` is unique to the save; each checksum covers `chunk_bytes`.
    """

    step: int
    save_id: str
    world_size: int
    metric: float | None
    chunk_bytes: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    values: dict[str, ValueEntry]

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """Returns the content of the manifest file."""
    body = json.dumps(vars(manifest), separators=(",", ":"), default=vars).encode()
    head = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "bytes": len(body),
        "xxh3_128": checksum(body),
        "save_id": manifest.save_id,
    }
    return json.dumps(head).encode() + b"\n" + body


def decode(content: bytes, where: str) -> Manifest:
    """Returns the manifest from the content of its file, which errors call `where`.

    Raises:
        CheckpointError: if it is truncated, damaged, or of a later format.
    """
    version = format_version(content)
    line, _, body = content.partition(b"\n")
    if version is None:
        raise CheckpointError(
            f"{where} is no manifest of a checkpoint, or its beginning is damaged"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format {version}, and this version of outlast reads up to "
            f"{FORMAT_VERSION}: update outlast"
        )
    head = json.loads(line)
    if len(body) != head.get("bytes") or checksum(body) != head.get("xxh3_128"):
        raise CheckpointError(f"{where} is damaged: its checksum does not match")
    try:
        return _build(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{where} has a form that this version of outlast does not know: {e!r}"
        ) from e


def format_version(content: bytes) -> int | None:
    """The version of the format, which a manifest names in its first line; `None` if that line is
    damaged, or not from this library.
    """
    try:
        head = json.loads(content.partition(b"\n")[0])
        version = head["version"] if head["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def saved_by(storage: Storage, folder: str) -> str:
    """The id of the save of a checkpoint, from the first line of its manifest; empty if that cannot
    be read.
    """
    buffer = bytearray(_HEAD_BYTES)
    try:
        reader = storage.open(folder, MANIFEST)
        try:
            size_bytes = reader.read_into(0, memoryview(buffer))
        finally:
            reader.close()
        return str(json.loads(bytes(buffer[:size_bytes]).partition(b"\n")[0]).get("save_id", ""))
    except (OSError, CheckpointError, ValueError, AttributeError):
        return ""


def _build(values: dict[str, Any]) -> Manifest:
    if type(values["chunk_bytes"]) is not int or not 0 < values["chunk_bytes"] <= 1 << 30:
        raise ValueError(f"chunk_bytes is {values['chunk_bytes']!r}")
    files = {name: FileEntry(**file) for name, file in values.pop("files").items()}
    tensors = {}
    for name, tensor in values.pop("tensors").items():
        shards = [Shard(**shard) for shard in tensor.pop("shards")]
        tensors[name] = TensorEntry(shards=shards, **tensor)
    saved = {name: ValueEntry(**value) for name, value in values.pop("values").items()}
    return Manifest(files=files, tensors=tensors, values=saved, **values)
