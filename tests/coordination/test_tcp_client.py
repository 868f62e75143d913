"""The client of torch's TCP store: its keys, interrupts, and connections that end."""

from __future__ import annotations

import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.stores.tcp_client import Query, SharedClient, TcpClient
from outlast.errors import RankShouldRestart, StoreError
from outlast.system.sockets import shut_down, socket_inodes

NET_S = 60.0


@pytest.fixture(params=[True, False], ids=["libuv", "threads"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """torch's store, with either of its servers."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )
    yield weakref.proxy(store)  # pytest keeps what a fixture yields
    del store


def test_it_sees_the_keys_of_torchs_client(server: Any) -> None:
    client = TcpClient("127.0.0.1", server.port, NET_S)
    server.set("theirs", "1")
    client.put("ours", b"2")
    assert client.read("theirs") == b"1"
    assert server.get("ours") == b"2"
    assert client.add("theirs", 1) == 2
    client.append("ours", b"3")
    client.delete("theirs")
    assert server.get("ours") == b"23"
    assert not server.check(["theirs"])


class Counting:
    """A connection that counts what it sends: a rank waits for the answer to each."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.sent = connection, 0

    def sendall(self, data: bytes, *flags: int) -> None:
        self.sent += 1
        self._connection.sendall(data, *flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_few_requests_wait_for_an_answer(server: Any) -> None:
    client: Any = TcpClient("127.0.0.1", server.port, NET_S)
    client.put("a", b"1")
    client.put("b", b"2")
    counting = client._connection = Counting(client._connection)

    def sent(work: Any) -> tuple[Any, int]:
        before = counting.sent
        return work(), counting.sent - before

    assert sent(lambda: client.read_all("a", "none", "b", "a")) == ([b"1", None, b"2", b"1"], 2)
    assert sent(lambda: client.read_all("none", "either")) == ([None, None], 1)
    assert sent(lambda: client.add_and_read("n", 2, "none")) == ((2, b""), 1)
    assert sent(lambda: client.add_and_read("n", 2, "a")) == ((4, b"1"), 2)
    assert sent(lambda: client.wait_for("a", None)) == (b"1", 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sent, lambda: client.wait_for("later", None))
        while not counting.sent > 9:
            pass
        server.set("later", "v")
        assert waiting.result(NET_S) == (b"v", 3)  # none is answered before it is set
    client.close()


def test_an_interrupted_operation_leaves_no_answer_for_the_next(server: Any) -> None:
    client = TcpClient("127.0.0.1", server.port, NET_S)

    def interrupt(number: int, frame: object) -> None:
        raise RankShouldRestart("here")

    previous = signal.signal(signal.SIGUSR2, interrupt)
    arguments = threading.get_ident(), signal.SIGUSR2
    try:
        timer = threading.Timer(0.1, signal.pthread_kill, arguments)
        timer.start()
        with pytest.raises(RankShouldRestart, match="here"):
            client.wait_for("k", None)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    server.set("k", "v")
    assert client.add("n", 1) == 1
    assert client.read("k") == b"v"


def test_after_a_timeout_another_connection_is_used(server: Any) -> None:
    client = TcpClient("127.0.0.1", server.port, NET_S)
    with pytest.raises(KeyTimeout):
        client.wait_for("k", 0.01)
    server.set("k", "v")  # the first connection gets the answer to the wait
    assert client.add("n", 5) == 5


def test_another_connection_after_an_interrupt_leaves_the_waits_of_other_threads(
    server: Any,
) -> None:
    client = SharedClient("127.0.0.1", server.port, NET_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_for, "k", None)
        while not client._waiting or client._waiting[0]._connection is None:
            pass
        theirs = client._waiting[0]._connection
        client._unfinished = True  # as an interrupt of an operation leaves it
        assert client.add("n", 1) == 1
        assert client._waiting[0]._connection is theirs
        server.set("k", "v")
        assert waiting.result(NET_S) == b"v"


def test_a_connection_that_is_shut_down_ends_the_wait_without_a_log_line(
    server: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(socket_inodes().values())
    client = TcpClient("127.0.0.1", server.port, NET_S)
    client.connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_for, "k", None)
        while not waiting.running():
            pass
        for descriptor, inode in socket_inodes().items():
            if inode not in before:
                shut_down(descriptor, inode)
        with pytest.raises(StoreError, match=f"127.0.0.1:{server.port}"):
            waiting.result(NET_S)
    # The server, in this process too, may say that it could not answer. The client says nothing.
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "TCPStoreLibUvBackend.cpp" not in line] == []


def test_something_else_that_answers_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.recv(16)
                connection.sendall(b"HTTP")

        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            with pytest.raises(StoreError, match="does not answer as a store"):
                TcpClient("127.0.0.1", port, NET_S).connect()


@pytest.mark.parametrize("server", [True], indirect=True, ids=["libuv"])  # the other hangs up
def test_a_key_that_comes_and_goes_is_never_read_as_empty(server: Any) -> None:
    """Between any two requests of a read, another client may delete the key and set it again."""
    client = TcpClient("127.0.0.1", server.port, NET_S)
    other = TcpClient("127.0.0.1", server.port, NET_S)
    client.read("k")  # connects
    connection = client._connection
    assert connection is not None

    class Between:
        """The connection; the key is deleted before each GET, and set again after it."""

        def sendall(self, data: bytes) -> None:
            if data[0] == Query.GET:
                other.delete("k")
            else:
                other.put("k", b"full")
                assert other.add("done", 1)  # answered, so the one before is performed
            connection.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(connection, name)

    client._connection = Between()  # type: ignore[assignment]
    assert client.read("k") == b"full"
    client._connection = connection
    other.put("k", b"")
    assert client.read("k") == b""
    other.delete("k")
    assert client.read("k") is None
