"""The messages between the main process and its writer, and the description of a snapshot in them.

There is one message class for each operation. A notification (`Message`) has no answer. A
`Request[A]` is answered by one `A`, or by `SaveDropped` or `RequestFailed`. On the channel, a
message is a line of JSON (the name of its class, its fields, the number of the request) followed by
`blob`, the bytes that belong to it.

Nothing here imports torch: the writer process runs without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypedDict, TypeVar

from outlast.system.channel import pack, unpack

A = TypeVar("A", bound="Message")


class _Outcome(TypedDict, total=False):
    files: dict[str, dict[str, Any]] | None
    committed: bool


class SnapshotDescription(_Outcome):
    """One snapshot, in JSON: the writer keeps it, a replacement process reads it.

    Attributes:
        number: counts the saves of its checkpointer.
        save_id: identifies the save; the same on all ranks.
        folder_id: identifies the folder of checkpoints.
        working, final: the folder of the checkpoint, before and after the commit.
        layout: name, offset in the buffer and size of each file of tensors.
        values: the file of the pickled values; empty if there are none.
        places: offset and size of each value in that file.
        socket: where the writer waits for a replacement of the main process.
        files: `size_bytes` and `checksums` of each file, once they are known.
    """

    step: int
    number: int
    save_id: str
    folder_id: str
    rank: int
    world_size: int
    working: str
    final: str
    layout: list[tuple[str, int, int]]
    values: str
    places: list[list[int]]
    socket: str


class HeldSnapshot(SnapshotDescription):
    """A snapshot in memory, as listed by the writer: with the number of its buffer, and what it
    holds and where (`Structure.index`).
    """

    buffer: int
    index: str


_TYPES: dict[str, type[Message]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message; `blob` holds its bytes that are not JSON."""

    blob: bytes = b""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _TYPES[cls.__name__] = cls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Message, Generic[A]):
    """A message that is answered by an `A`."""


# ------------------------------------------------------------------------------- notifications


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareBuffer(Message):
    """Shares a buffer, whose descriptor is attached, replacing the one with that number. `blob` is
    the index of what it will hold (`Structure.index`).
    """

    buffer: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferReused(Message):
    """The main process is about to write into the buffer: its snapshot is no longer valid."""

    buffer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseBuffer(Message):
    """The buffer is no longer needed."""

    buffer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepMemory(Message):
    """Keeps the memory whose descriptor is attached, instead of what was kept before: if the main
    process is killed, its replacement gets it at `socket`, with the snapshots.
    """

    size_bytes: int
    socket: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotCopied(Message):
    """The snapshot is copied up to this offset of the buffer."""

    buffer: int
    save_id: str
    upto: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotTorn(Message):
    """The snapshot will not be completed."""

    buffer: int
    save_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotSealed(Message):
    """The snapshot is complete; `blob` holds its pickled values."""

    buffer: int
    snapshot: SnapshotDescription


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotCommitted(Message):
    """The snapshot is committed as a checkpoint."""

    buffer: int
    save_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropSaves(Message):
    """Everything that is being written is dropped, until the next `BeginSave`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """The main process ends normally; the writer ends too, and keeps nothing. It completes removals
    in the background first, deletes the recycled files if `tidy`, and removes what it has written
    of saves that were not committed if `last`: the main process is rank 0, so no other process will
    commit them.
    """

    tidy: bool
    last: bool = False


# ------------------------------------------------------------------------ answers and requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done(Message):
    """The request was carried out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilesWritten(Message):
    """The files are durable: `size_bytes` and `checksums` of each, unless the main process hashes
    the snapshot.
    """

    files: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemovalErrors(Message):
    """Errors of removals since they were last reported."""

    errors: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled(Message):
    """Whether the save is committed; if it is, durably."""

    committed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshots(Message):
    """The snapshots that are complete, with their checksums."""

    snapshots: list[HeldSnapshot]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveDropped(Message):
    """The request was dropped by `DropSaves`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestFailed(Message):
    """The request failed; `external` if its cause is outside this library, such as the disk."""

    error: str
    traceback: str
    external: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginSave(Request[Done]):
    """A new save begins: an earlier `DropSaves` does not apply to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSnapshot(Request[FilesWritten]):
    """Writes the files (name, first byte in the buffer, size) of a snapshot into a folder, durably.
    `blob` holds its pickled values, for `values_file`; that is empty if there are none. `hashed`:
    the main process takes the checksums.
    """

    buffer: int
    save_id: str
    folder: str
    files: list[tuple[str, int, int]]
    values_file: str
    hashed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit(Request[Done]):
    """Makes a checkpoint visible. `files` (name, size), whose contents are in `blob`, are written
    first, in order: the last is the manifest. In a job on many hosts it is refused unless the
    newest fence is that of `writer` and the host holds its lease (`lease` is the path of the page).
    """

    working: str
    final: str
    files: list[tuple[str, int]]
    writer: str = ""
    lease: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettleCommit(Request[Settled]):
    """After a `Commit` that failed, or whose writer was lost: finds out whether the checkpoint is
    visible, and makes that durable.
    """

    working: str
    final: str
    save_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveFolders(Request[Done]):
    """Removes folders, and returns when they are gone."""

    folders: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HideFolders(Request[RemovalErrors]):
    """Makes checkpoints invisible, durably; their files are removed in the background. Refused
    like a `Commit`.
    """

    folders: list[str]
    writer: str = ""
    lease: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AwaitRemovals(Request[RemovalErrors]):
    """Waits for the removals in the background, and deletes recycled files too if `tidy`."""

    tidy: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeSnapshots(Request[Snapshots]):
    """Lists the snapshots in memory."""


def encode(message: Message, number: int = 0) -> bytes:
    """The payload of a message, or of the request or answer of this number."""
    header = {**vars(message), "type": type(message).__name__, "number": number}
    return pack(header, header.pop("blob"))


def decode(payload: bytes) -> tuple[Message, int]:
    """The message and the number that `encode` was given."""
    header, blob = unpack(payload)
    number = header.pop("number")
    return _TYPES[header.pop("type")](**header, blob=blob), number
