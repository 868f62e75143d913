"""The protocol of torch's TCP store: requests, however the bytes are cut, and what is none."""

from __future__ import annotations

import random
import struct

import pytest

from outlast.coordination.stores.tcp_client import Query
from outlast.launch.hosts.server.wire_protocol import (
    MalformedRequest,
    Request,
    RequestReader,
    encode_keys,
    encode_value,
)

MAGIC = struct.pack("=BI", Query.VALIDATE, 0x3C85F7CE)


def text(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def number(value: int) -> bytes:
    return struct.pack("=q", value)


def request(query: int, *arguments: bytes) -> bytes:
    return bytes([query]) + b"".join(arguments)


STREAM = b"".join(
    [
        MAGIC,
        request(Query.PING, struct.pack("=I", 77)),
        request(Query.SET, text(b"/k"), text(b"\xff\0v")),
        request(Query.COMPARE_SET, text(b"/k"), text(b""), text(b"new")),
        request(Query.ADD, text(b"/n"), number(-3)),
        request(Query.WAIT, number(2), text(b"/a"), text("/\u00fc".encode())),
        request(Query.CANCEL_WAIT),
        request(Query.MULTI_SET, number(2), text(b"/a"), text(b"1"), text(b"/b"), text(b"2")),
        request(Query.GETNUMKEYS),
        request(Query.BARRIER, text(b"/b"), number(4)),
        request(Query.CHECK, number(0)),
    ]
)
REQUESTS = [
    Request(Query.PING, number=77),
    Request(Query.SET, ("/k",), (b"\xff\0v",)),
    Request(Query.COMPARE_SET, ("/k",), (b"", b"new")),
    Request(Query.ADD, ("/n",), number=-3),
    Request(Query.WAIT, ("/a", "/\u00fc")),
    Request(Query.CANCEL_WAIT),
    Request(Query.MULTI_SET, ("/a", "/b"), (b"1", b"2")),
    Request(Query.GETNUMKEYS),
    Request(Query.BARRIER, ("/b",), number=4),
    Request(Query.CHECK),
]


def test_requests_are_read_however_they_are_cut() -> None:
    rng = random.Random(0)
    for _ in range(50):
        reader, read, at = RequestReader(), [], 0
        while at < len(STREAM):
            size = rng.choice([1, 2, 7, 30, 500])
            read += reader.feed(STREAM[at : at + size])
            at += size
        assert read == REQUESTS


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "request 71 is unknown"),
        (request(Query.VALIDATE, b"\0\0\0\0"), "magic number"),
        (request(Query.SET, text(b"/k"), text(b"v")), "SET out of place"),
        (MAGIC + MAGIC, "VALIDATE out of place"),
        (MAGIC + b"\xff", "request 255"),
        (MAGIC + request(Query.GET, struct.pack("=Q", 1 << 40)), "GET with an argument of"),
        (MAGIC + request(Query.SET, text(b"/k"), struct.pack("=Q", 9 << 20)), "SET with an arg"),
        (MAGIC + request(Query.WAIT, struct.pack("=Q", 1 << 40)), "WAIT of 1099511627776 keys"),
        (MAGIC + request(Query.GET, text(b"/\xff")), "not UTF-8"),
        (MAGIC + request(Query.QUEUE_POP, text(b"/q")), "queues are not served"),
    ],
)
def test_what_is_no_request_is_refused_before_its_bytes_are_kept(sent: bytes, says: str) -> None:
    with pytest.raises(MalformedRequest, match=says):
        RequestReader().feed(sent)


def test_many_large_values_are_refused_as_one() -> None:
    reader = RequestReader()
    reader.feed(MAGIC + request(Query.MULTI_SET, number(100)))
    with pytest.raises(MalformedRequest, match="MULTI_SET"):
        for _ in range(100):
            reader.feed(text(b"/k") + text(bytes(4 << 20)))


def test_answers() -> None:
    assert encode_value(b"abc") == text(b"abc")
    assert encode_keys(["/a", "/b"]) == number(2) + text(b"/a") + text(b"/b")
