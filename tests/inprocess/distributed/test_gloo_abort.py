"""Gloo's sockets are found, no others, and shutting them down ends collectives in flight."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.inprocess.interruption import gloo
from outlast.system import sockets


@contextmanager
def groups(names: list[str]) -> Iterator[list[list[Any]]]:
    """Groups of two ranks, both in this process: a backend object for each rank."""
    store = dist.HashStore()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(minutes=30)
    made: list[list[Any]] = []
    with ThreadPoolExecutor(2) as pool:

        def make(name: str, rank: int) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options)

        for name in names:
            made.append(list(pool.map(make, [name, name], [0, 1])))
            # Some connections are made only on first use.
            works = [pg.allreduce([torch.ones(4)]) for pg in made[-1]]
            for work in works:
                work.wait()
        yield made
    made.clear()


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        server, _ = listener.accept()
        with server:
            yield client, server


class Others:
    """Everything else that a process may have in an epoll instance."""

    def __init__(self, stack: ExitStack) -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        self.store: Any = [client, server]
        stack.callback(self.store.clear)
        self.near, self.far = stack.enter_context(connected())
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        selector = stack.enter_context(selectors.EpollSelector())
        selector.register(self.near, selectors.EVENT_READ, data=self)
        selector.register(self.listener, selectors.EVENT_READ)
        self.loop = asyncio.new_event_loop()
        stack.callback(self.loop.close)
        self.reader, self.writer = stack.enter_context(connected())
        self.reader.setblocking(False)
        self.loop.add_reader(self.reader, lambda: None)

    def work(self) -> None:
        """Checks that all these still work."""
        self.far.send(b"x")
        assert self.near.recv(1) == b"x"
        self.writer.send(b"y")
        assert self.loop.run_until_complete(self.loop.sock_recv(self.reader, 1)) == b"y"
        self.loop.add_reader(self.reader, lambda: None)
        with socket.create_connection(self.listener.getsockname()):
            self.listener.accept()[0].close()
        self.store[0].set("k", "v")
        assert self.store[0].get("k") == b"v"


def is_connected(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.getpeername() is not None


def test_without_gloo_none_is_found() -> None:
    with ExitStack() as stack:
        others = Others(stack)
        assert gloo.pair_sockets() == {}
        others.work()
        others.store.clear()


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"]])
def test_exactly_the_pairs_are_found(names: list[str]) -> None:
    with ExitStack() as stack:
        others = Others(stack)
        before = sockets.socket_inodes()
        with groups(names):
            found = gloo.pair_sockets()
            # Both ends of every connection are in this process.
            assert len(found) == 2 * len(names)
            assert not set(found.items()) & set(before.items())
            assert all(is_connected(descriptor) for descriptor in found)
            # Gloo itself closes the other end of each, before or after its turn.
            assert sum(sockets.shut_down(*pair) for pair in found.items()) >= len(names)
            others.work()
        others.store.clear()


def test_a_collective_in_flight_ends() -> None:
    with groups(["one"]) as [[here, there]]:
        work = here.allreduce([torch.ones(4)])
        assert not work.is_completed()
        for descriptor, inode in gloo.pair_sockets().items():
            sockets.shut_down(descriptor, inode)
        with pytest.raises(RuntimeError, match=r"Connection|Socket|closed|reset"):
            work.wait()
        del work, here, there


def test_a_descriptor_that_is_another_file_by_now_is_not_touched() -> None:
    with connected() as (near, far), connected() as (other, peer):
        descriptor, inode = near.fileno(), sockets.socket_inodes()[near.fileno()]
        os.dup2(other.fileno(), descriptor)  # the number now refers to another connection
        assert not sockets.shut_down(descriptor, inode)
        other.send(b"x")
        assert peer.recv(1) == b"x"
        assert far.recv(1) == b""  # its end was closed by `dup2`, not by the abort


def test_what_is_closed_or_not_connected_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inode = sockets.socket_inodes()[listener.fileno()]
        gone = listener.fileno()
    assert not sockets.shut_down(gone, inode)
    with socket.socket() as fresh:
        assert not sockets.shut_down(fresh.fileno(), sockets.socket_inodes()[fresh.fileno()])


def test_descriptors_may_come_and_go_while_it_looks() -> None:
    end = threading.Event()

    def churn() -> None:
        while not end.is_set():
            with selectors.EpollSelector() as selector, connected() as (near, _):
                selector.register(near, selectors.EVENT_READ)

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(churn) for _ in range(2)]
        for _ in range(200):
            assert gloo.pair_sockets() == {}
            sockets.socket_inodes()
        end.set()
        for work in busy:
            work.result()
