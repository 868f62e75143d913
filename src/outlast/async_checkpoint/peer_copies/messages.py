"""The messages between a main process and its keeper, in the format of `writer/messages.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

from outlast.async_checkpoint.writer.messages import Message, Request, SnapshotDescription
from outlast.system.channel import pack, unpack


class SentSnapshot(SnapshotDescription):
    """A snapshot as it travels between hosts: with the index of what it holds
    (`Structure.index`).
    """

    index: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperDone(Message):
    """The request was carried out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperFailed(Message):
    """The request failed."""

    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arranged(Message):
    """The port at which the keeper listens."""

    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies(Message):
    """The copies that the keeper holds: the description of each snapshot."""

    copies: list[SentSnapshot]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrange(Request[Arranged]):
    """A checkpointer begins: the keeper listens at `address`, speaks only with processes that know
    `token`, and sends at most `bytes_per_s`. Once it has answered, it does not complete a copy
    that it was sending, and it has the copies of keepers of this host whose main process is dead.
    """

    address: str
    token: str
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SendCopy(Request[KeeperDone]):
    """Sends a sealed snapshot to the keeper at `address` and `port`. The descriptor of the buffer
    is attached, `size_bytes` is its size, `blob` holds the pickled values. The answer comes when
    the copy is there and verified, or failed.
    """

    snapshot: SentSnapshot
    size_bytes: int
    address: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepOnly(Request[KeeperDone]):
    """Releases all copies except those of these saves."""

    save_ids: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeCopies(Request[Copies]):
    """Lists the copies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperGoodbye(Message):
    """The main process ends normally: the keeper ends too."""


_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Arrange,
        Arranged,
        Copies,
        DescribeCopies,
        KeepOnly,
        KeeperDone,
        KeeperFailed,
        KeeperGoodbye,
        SendCopy,
    )
}


def encode(message: Message, number: int = 0) -> bytes:
    """The payload of a message, or of the request or answer of this number."""
    header: dict[str, Any] = {**vars(message), "type": type(message).__name__, "number": number}
    return pack(header, header.pop("blob"))


def decode(payload: bytes) -> tuple[Message, int]:
    """The message and the number that `encode` was given."""
    header, blob = unpack(payload)
    number = header.pop("number")
    return _TYPES[header.pop("type")](**header, blob=blob), number
