"""The manifest: what a checkpoint consists of, and how to know that it is what was written.

It is the last file that is written, so a folder without one is no checkpoint. Its first line says
how long the rest is and what its checksum is; the rest is JSON: the step, the id of the save, each
file with its size and the xxh3 (128 bit) checksum of every `CHUNK_BYTES` of it, and where in the
files each tensor and each value lies. A load therefore needs no pickle, and a rank that reads one
shard verifies the chunks of that shard alone.

Nothing here imports torch: the command line and the writer process do without.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import xxhash

from outlast.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "Shard",
    "TensorEntry",
    "ValueEntry",
    "checksum",
    "decode",
    "encode",
]

MANIFEST = "manifest.json"
FORMAT = "outlast-checkpoint"
FORMAT_VERSION = 1

# A key of a dict (text or number), or `[i]`: the place in a list.
Path = list[Any]


def checksum(data: bytes | memoryview) -> str:
    """xxh3 of 128 bits, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file: its name in the folder, its size, the checksum of each `chunk_bytes` of it."""

    name: str
    size_bytes: int
    checksums: list[str]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a tensor: where it begins in the tensor, its shape, and where its bytes lie."""

    offsets: list[int]
    sizes: list[int]
    file: str
    at: int


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor: `dtype` without `torch.`, its whole shape, and its parts. `opaque` ones (sparse,
    quantized) have one part, in torch's own serialization of `opaque` bytes.
    """

    path: Path
    dtype: str
    shape: list[int]
    shards: list[Shard]
    opaque: int = 0


@dataclasses.dataclass(frozen=True)
class ValueEntry:
    """A Python value, in torch's serialization."""

    path: Path
    file: str
    at: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one checkpoint consists of.

    Attributes:
        step: of the training.
        save_id: of the save, unlike that of any other.
        world_size: of the job that saved it.
        metric: what `save(metric=...)` was given.
        chunk_bytes: the stretch that each checksum is of.
        files, tensors, values: the content; tensors and values by their flat names.
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
        """Of all its files."""
        return sum(file.size_bytes for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """The manifest as the content of its file."""
    body = json.dumps(vars(manifest), separators=(",", ":"), default=vars).encode()
    head = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "bytes": len(body),
        "xxh3_128": checksum(body),
    }
    return json.dumps(head).encode() + b"\n" + body


def decode(content: bytes, where: str) -> Manifest:
    """The manifest that `encode` made `content` of.

    Args:
        content: of the file.
        where: the file, for errors.

    Raises:
        CheckpointError: when it is not whole, not what was written, or of a later format.
    """
    line, _, body = content.partition(b"\n")
    head: dict[str, Any] = {}
    try:
        head = json.loads(line)
        version = head["version"] if head["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError):
        version = None
    if not isinstance(version, int):
        raise CheckpointError(f"{where} is no manifest of a checkpoint, or its beginning is lost")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} is of format {version}, this outlast reads up to {FORMAT_VERSION}: update it"
        )
    if len(body) != head.get("bytes") or checksum(body) != head.get("xxh3_128"):
        raise CheckpointError(f"{where} is damaged: its checksum does not hold")
    try:
        return _build(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{where} is of a form that this outlast does not know: {e!r}") from e


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
