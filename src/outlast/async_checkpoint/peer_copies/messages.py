"""The messages between a main process and its keeper, besides those of `writer/messages.py`."""

from __future__ import annotations

import dataclasses

from outlast.async_checkpoint.writer.messages import Done, Message, Request, SnapshotDescription


class SentSnapshot(SnapshotDescription):
    """A snapshot as it travels between hosts: with the index of what it holds
    (`Structure.index`).
    """

    index: str


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
class SendCopy(Request[Done]):
    """Sends a sealed snapshot to the keeper at `address` and `port`. The descriptor of the buffer
    is attached, `size_bytes` is its size, `blob` holds the pickled values. The answer comes when
    the copy is there and verified, or failed.
    """

    snapshot: SentSnapshot
    size_bytes: int
    address: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepOnly(Request[Done]):
    """Releases all copies except those of these saves."""

    save_ids: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeCopies(Request[Copies]):
    """Lists the copies."""
