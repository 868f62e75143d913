"""Frames between agents: limits, and what is not a message."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.replicated import connection
from outlast.launch.hosts.replicated.connection import PART_BYTES, STRANGER_BYTES, Connection
from outlast.launch.hosts.replicated.handshake import OPEN
from outlast.launch.hosts.replicated.messages import (
    Admitted,
    Find,
    Hello,
    Member,
    Message,
    NotYet,
    Replicated,
    decode,
    encode,
)
from outlast.launch.hosts.replicated.past import Past

HOST = HostInfo(id="h", name="h", address="10.0.0.1", port=1, settings={"a": "b"})


class Ends:
    """A connection, and the raw socket at its other end."""

    def __init__(self, loop: EventLoop) -> None:
        ours, self.raw = socket.socketpair()
        ours.setblocking(False)
        self.loop = loop
        self.got: list[Message] = []
        self.closed: list[str] = []
        self.connection = Connection(
            loop, ours, lambda _, m: self.got.append(m), lambda _, why: self.closed.append(why)
        )
        loop.run_once()  # sends the first bytes

    def receive(self, data: bytes) -> None:
        self.raw.sendall(data)
        for _ in range(2):  # what may belong to the handshake is read first
            self.loop.call_later(0.0, lambda: None)
            self.loop.run_once()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with EventLoop() as loop:
        ends = Ends(loop)
        yield ends
        ends.connection.close()
        ends.raw.close()


packed = msgspec.msgpack.encode


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def test_messages_arrive_whole_however_they_are_cut(ends: Ends) -> None:
    sent = [Find(Past()), Replicated("g", "h", b"\n\xff\n"), NotYet("later", 1.5)]
    data = OPEN + b"".join(frame(encode(message)) for message in sent)
    for at in range(0, len(data), 7):
        ends.receive(data[at : at + 7])
    assert ends.got == sent
    assert ends.closed == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400", "no outlast agent: it says b'HTTP/1.1 400'"),
        (OPEN + (STRANGER_BYTES + 1).to_bytes(4, "big"), "too long"),
        (OPEN + frame(b"X"), "not a message of an agent"),
        (OPEN + frame(packed(["Hello", 1])), "not a message of an agent"),
        (OPEN + frame(packed(["NotYet", 1, 0.0])), "Expected `str`, got `int`"),
        (OPEN + frame(b"\x92\xa8Admitted" + b"\x91" * 60_000), "not a message of an agent"),
        (OPEN + frame(b"\x91" * 60_000), "not a message of an agent"),
        (OPEN + frame(b"\xc1"), "not a message of an agent"),
        (OPEN + frame(b""), "not a message of an agent"),
    ],
)
def test_what_is_no_message_ends_the_connection(ends: Ends, data: bytes, reason: str) -> None:
    ends.receive(data)
    (why,) = ends.closed
    assert reason in why
    assert not ends.connection.is_open


def test_after_the_handshake_messages_may_be_long(ends: Ends) -> None:
    ends.connection.limit = connection.FRAME_BYTES
    long = Replicated("g", "h", b"x" * (2 * STRANGER_BYTES))
    whole = encode(long)
    parts = [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]
    heads = [len(part) | 3 << 30 for part in parts[:-1]] + [len(parts[-1]) | 1 << 31]
    framed = [head.to_bytes(4, "big") + part for head, part in zip(heads, parts, strict=True)]
    ends.receive(OPEN + b"".join(framed))
    while not ends.got:
        ends.loop.run_once()
    assert ends.got == [long]


@pytest.mark.parametrize(
    "wrong",
    [{"address": "nowhere"}, {"port": 1 << 16}, {"name": None}, {"settings": {"a": 1}}],
)
def test_a_host_that_is_none(wrong: dict[str, Any]) -> None:
    host = msgspec.structs.asdict(HOST)
    assert decode(packed(["Hello", 1, "r", host])) == Hello(1, "r", HOST)
    with pytest.raises(ValueError, match="not a message of an agent"):
        decode(packed(["Hello", 1, "r", host | wrong]))


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "run", HOST),
        Member("g", 1, None, 0),
        Member("g", 1, HOST, 2),
        Admitted("g", 1, "h", (HOST,)),
    ],
)
def test_hosts_in_messages(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_short_message_overtakes_a_long_one(ends: Ends) -> None:
    ends.connection.limit = connection.FRAME_BYTES
    long = Replicated("g", "h", b"x" * (64 << 20))  # far more than a socket holds
    ends.connection.send(long)
    ends.connection.send(Find(Past()))
    theirs: list[Message] = []
    ends.raw.setblocking(False)
    other = Connection(ends.loop, ends.raw, lambda _, m: theirs.append(m), lambda *_: None)
    other.limit = connection.FRAME_BYTES
    while len(theirs) < 2:
        ends.loop.run_once()
    other.close()
    assert theirs == [Find(Past()), long]
