"""The channel: whole messages, with their descriptors, and a clear end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.system.channel import MAX_DESCRIPTORS, Channel

Ends = tuple[Channel, Channel]
# How the line in /proc of a thread begins that waits in `poll`, or in `ppoll`.
WAITS = {"x86_64": "7 ", "aarch64": "73 "}.get(platform.machine(), "")


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = Channel.pair()
    yield one, other
    one.close()
    other.close()


@given(st.lists(st.tuples(st.binary(max_size=5000), st.integers(0, 3)), max_size=8))
def test_messages_arrive_whole_in_order_and_with_their_descriptors(
    messages: list[tuple[bytes, int]],
) -> None:
    one, other = Channel.pair()
    null = os.open(os.devnull, os.O_RDONLY)
    for payload, count in messages:
        one.send(payload, [null] * count)
    one.close()
    for payload, count in messages:
        received, descriptors = other.receive()
        assert received == payload
        assert len(descriptors) == count
        for descriptor in descriptors:
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    with pytest.raises(EOFError):
        other.receive()
    other.close()
    os.close(null)


def test_a_large_message(ends: Ends) -> None:
    payload = os.urandom(5 << 20)
    sender = threading.Thread(target=ends[0].send, args=(payload,))
    sender.start()
    assert ends[1].receive() == (payload, [])
    sender.join()


def test_a_descriptor_leads_to_the_same_file(ends: Ends) -> None:
    read, write = os.pipe()
    ends[0].send(b"here", [write])
    os.close(write)
    _, (received,) = ends[1].receive()
    os.write(received, b"hello")
    os.close(received)
    assert os.read(read, 10) == b"hello"
    assert os.read(read, 10) == b""
    os.close(read)


def test_an_end_in_the_middle_of_a_message() -> None:
    for torn in (b"\0\0\0", b"\0" * 7 + b"\5" + b"abc"):
        raw, sock = socket.socketpair()
        raw.send(torn)
        raw.close()
        channel = Channel(sock)
        with pytest.raises(EOFError):
            channel.receive()
        channel.close()


def test_a_sender_whose_peer_is_gone(ends: Ends) -> None:
    ends[0].send(b"unread")
    ends[0].close()
    ends[1].close()
    one, other = Channel.pair()
    other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        one.send(b"x")
    with pytest.raises(EOFError):
        one.receive()
    one.close()


def test_a_peer_that_went_without_reading(ends: Ends) -> None:
    ends[0].send(b"never read")
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].receive()


class Interrupted(BaseException):
    pass


def test_an_interrupt_leaves_a_whole_message_and_the_channel(ends: Ends) -> None:
    """One that comes while the message waits for room is raised once it is sent."""
    ends[0].limit(0.05)
    count = 0
    with contextlib.suppress(TimeoutError):
        while True:
            ends[0]._socket.send(struct.pack(">Q", 100) + b"x" * 100)
            count += 1
    ends[0].limit(60)
    outcome: list[BaseException] = []

    def send() -> None:
        try:
            ends[0].send(b"interrupted")
        except Interrupted as e:
            outcome.append(e)

    sender = threading.Thread(target=send)
    sender.start()
    call = f"/proc/self/task/{sender.native_id}/syscall"
    while not Path(call).read_text().startswith(WAITS):
        pass
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(sender.ident or 0), ctypes.py_object(Interrupted)
    )
    for _ in range(count):
        assert ends[1].receive()[0] == b"x" * 100
    assert ends[1].receive()[0] == b"interrupted"
    sender.join()
    assert outcome
    ends[0].send(b"next")
    assert ends[1].receive()[0] == b"next"


def test_a_message_that_was_interrupted_in_the_middle_ends_the_channel(ends: Ends) -> None:
    class Socket:
        """Sends only the first bytes."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

        def sendmsg(self, parts: list[bytes], ancillary: object) -> int:
            return self._sock.send(b"".join(parts)[:9])

        def sendall(self, data: bytes) -> None:
            raise Interrupted

    ends[0]._socket = Socket(ends[0]._socket)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        ends[0].send(b"hello")
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(BrokenPipeError):
        ends[0].send(b"")


def test_too_many_descriptors(ends: Ends) -> None:
    with pytest.raises(ValueError, match=str(MAX_DESCRIPTORS)):
        ends[0].send(b"", [0] * (MAX_DESCRIPTORS + 1))
    ends[0].send(b"", [0] * MAX_DESCRIPTORS)
    _, descriptors = ends[1].receive()
    assert len(descriptors) == MAX_DESCRIPTORS
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    "module",
    ["system.background_process", "async_checkpoint.calls.worker_main", "coordination.call_ledger"],
)
def test_what_background_processes_import_does_not_bring_torch(module: str) -> None:
    code = f"import sys, outlast.{module}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout == b"False\n"
