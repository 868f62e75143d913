"""A rank's small memory, mirrored by another process: complete blocks only, in bounded memory."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outlast.async_checkpoint.peer_copies import mirror, transfer
from outlast.async_checkpoint.peer_copies.mirror import Mirrors, MirrorSender, MirrorServer
from outlast.async_checkpoint.peer_copies.transfer import Connection
from outlast.system.shared_memory import SharedMemory

BLOCK = 8192
WAIT_S = 60.0


class Holder:
    """A server; `count` memories have come."""

    def __init__(self) -> None:
        self._came = threading.Semaphore(0)
        self.server = MirrorServer("127.0.0.1", lambda *_: self._came.release())
        self.ended: list[SharedMemory] = []

    def await_mirror(self) -> None:
        assert self._came.acquire(timeout=WAIT_S)

    def end(self) -> list[SharedMemory]:
        self.ended = self.server.end()
        return self.ended


@pytest.fixture
def holder() -> Iterator[Holder]:
    found = Holder()
    yield found
    for memory in found.ended or found.end():
        memory.close()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    found = SharedMemory(4 * BLOCK)
    yield found
    found.close()


@pytest.fixture
def sender(holder: Holder, memory: SharedMemory) -> Iterator[MirrorSender]:
    found = MirrorSender(memory, BLOCK, ("127.0.0.1", holder.server.port), "token", "h2")
    yield found
    found.close()
    found._thread.join(WAIT_S)
    assert not found._thread.is_alive()


def is_idle(sender: MirrorSender) -> bool:
    return sender._given == sender._done


def until(condition: Callable[[], bool]) -> None:
    """The end of a thread's work, which nothing announces."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("in vain")


def test_what_was_written_has_arrived_when_the_holder_ends(
    holder: Holder, memory: SharedMemory, sender: MirrorSender
) -> None:
    """Though the writer neither waits nor closes: its bytes were given to the kernel. They are
    fewer than the kernel receives before the holder reads any.
    """
    holder.server.begin("token")
    holder.await_mirror()
    until(lambda: is_idle(sender))
    for number in range(40):
        at = number % 4 * BLOCK
        memory.view[at : at + 600] = bytes([number]) * 600
        memory.view[(at + BLOCK) % (4 * BLOCK) + 20] = 255 - number
        places = [((at + BLOCK) % (4 * BLOCK) + 20, 1)] if number > 3 else []
        sender.wrote(*places, (at, 600))
        assert is_idle(sender)
    (found,) = holder.end()
    assert found.view == memory.view


def test_a_link_that_lags_gets_the_newest_contents(
    holder: Holder, memory: SharedMemory, sender: MirrorSender
) -> None:
    """The holder does not answer yet. No write waits for it, and a part of a block that it has in
    an older version is not sent alone.
    """
    for number in range(100):
        memory.view[: BLOCK // 2] = bytes([number]) * (BLOCK // 2)
        sender.wrote((0, BLOCK // 2))
        memory.view[8] = 200
        sender.wrote((8, 1))
    assert not is_idle(sender)
    assert len(sender._late) == 1
    holder.server.begin("token")
    until(lambda: is_idle(sender))
    (found,) = holder.end()
    assert found.view == memory.view
    assert found.view[9] == 99


def test_more_than_the_kernel_takes_is_sent_by_the_thread(holder: Holder) -> None:
    holder.server.begin("token")
    memory = SharedMemory(64 << 20)
    sender = MirrorSender(memory, 64 << 20, ("127.0.0.1", holder.server.port), "token", "h2")
    until(lambda: is_idle(sender))
    memory.view[:] = b"\1\2\3\4" * (16 << 20)
    sender.wrote((0, 64 << 20))
    assert not is_idle(sender)
    memory.view[0] = 9  # meanwhile: the block is sent once more
    sender.wrote((0, 64 << 20))
    until(lambda: is_idle(sender))
    (found,) = holder.end()
    assert found.view == memory.view
    sender.close()
    sender._thread.join(WAIT_S)
    memory.close()


def test_a_link_that_breaks_is_said_once_and_stops_nothing(
    holder: Holder, memory: SharedMemory, sender: MirrorSender, caplog: pytest.LogCaptureFixture
) -> None:
    holder.server.begin("token")
    until(lambda: is_idle(sender))
    holder.end()
    until(lambda: sender.wrote((0, BLOCK)) or sender._closed)
    for _ in range(3):
        sender.wrote((0, BLOCK))
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == 1, said
    assert "no longer mirrored on host h2" in said[0]


def test_an_interrupt_in_the_middle_ends_the_link(
    holder: Holder, memory: SharedMemory, sender: MirrorSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much was sent: nothing that follows would be understood."""
    holder.server.begin("token")
    until(lambda: is_idle(sender))

    def interrupted(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send_now", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.wrote((0, BLOCK))
    memory.view[:4] = b"late"
    sender.wrote((0, BLOCK))
    (found,) = holder.end()
    assert bytes(found.view[:4]) == bytes(4)


@pytest.mark.parametrize("frame", [(4 * BLOCK, 1), (0, 4 * BLOCK + 1), (1 << 63, 1 << 63)])
def test_a_frame_outside_of_the_memory_ends_that_mirror(
    holder: Holder, frame: tuple[int, int]
) -> None:
    holder.server.begin("token")
    connection = Connection.open("127.0.0.1", holder.server.port, "token")
    connection.send_frame({"size_bytes": 4 * BLOCK})
    connection.send(memoryview(mirror._FRAME.pack(0, 4) + b"good" + mirror._FRAME.pack(*frame)))
    with pytest.raises(EOFError):
        connection.receive_frame()
    connection.close()
    (found,) = holder.end()
    assert bytes(found.view[:5]) == b"good\0"


@pytest.mark.parametrize("size", ["much", -1, 1 << 62, None])
def test_memory_that_is_not_there_is_refused(holder: Holder, size: Any) -> None:
    holder.server.begin("token")
    connection = Connection.open("127.0.0.1", holder.server.port, "token")
    connection.send_frame({"size_bytes": size})
    with pytest.raises((EOFError, ConnectionError)):
        connection.receive_frame()
    connection.close()
    assert holder.end() == []


def test_a_process_of_another_job_is_refused(
    holder: Holder, sender: MirrorSender, caplog: pytest.LogCaptureFixture
) -> None:
    holder.server.begin("another token")
    until(lambda: sender._closed)
    assert "does not belong to this job" in caplog.text
    assert holder.end() == []


def test_a_client_that_says_nothing_holds_up_no_restart(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_HANDSHAKE_S", 600.0)
    accepted = threading.Event()
    accept = Connection.accept
    monkeypatch.setattr(Connection, "accept", lambda *a: accepted.set() or accept(*a))
    holder.server.begin("token")
    with socket.create_connection(("127.0.0.1", holder.server.port)):
        assert accepted.wait(WAIT_S)
        assert holder.end() == []
        assert not any(thread.is_alive() for thread in holder.server._threads)


def offers(*hosts: str) -> list[list[Any]]:
    return [[host, host, f"10.0.0.{number}", 1000] for number, host in enumerate(hosts)]


def test_each_rank_has_its_mirror_in_the_next_domain() -> None:
    found = Mirrors.arranged(offers("a", "a", "b", "b", "c"))
    assert found is not None
    assert [host for host, *_ in found["to"]] == ["b", "b", "c", "c", "a"]
    assert Mirrors.arranged(offers("a", "a")) is None


def test_a_rank_that_cannot_listen_holds_nothing() -> None:
    found = Mirrors.arranged([["a", "a"], *offers("b")])
    mirrors = Mirrors(lambda *_: None)
    assert mirrors.accept(found, 1) is None
    assert mirrors.accept(found, 0) is not None
    assert mirrors.collect() == []


def test_a_host_in_two_domains_is_said_and_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    assert Mirrors.arranged([["a", "1", "x", 1], ["a", "2", "y", 1]]) is None
    assert "set it to one value on each host" in caplog.text


def test_a_process_alone_on_its_host_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTLAST_FAILURE_DOMAIN", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mirrors = Mirrors(lambda *_: None)
    assert len(mirrors.offer()) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OUTLAST_HOST_ADDR", "127.0.0.1")
    assert mirrors.offer()[2:] == ["127.0.0.1", mirrors._server and mirrors._server.port]
    mirrors.close()


def test_mirrors_stay_until_there_are_newer_ones() -> None:
    kept: list[str] = []
    mirrors = Mirrors(lambda _, name: kept.append(name))
    one, other = SharedMemory(1), SharedMemory(1)
    mirrors.adopt({"mirror 1": one})
    mirrors.begun()
    mirrors.adopt({"mirror 1": other})
    assert mirrors.collect() == [other, one]
    mirrors.begun()
    assert mirrors.collect() == [other]
    assert not one.intact
    mirrors.close()
    assert not other.intact
    assert kept == ["mirror 1", "mirror 1"]
