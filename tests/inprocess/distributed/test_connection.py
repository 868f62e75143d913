"""Connections to the store: retries, timeouts, errors, and break-off by another thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from outlast.errors import RankTimeout, StoreError
from outlast.inprocess.store import FileStore, TCPStore, connect
from procs import free_port

NET_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[tuple[str, int]]:
    """The endpoint of a store that is served during the test."""
    server = TCPStore.serve(host_name="127.0.0.1", port=0)
    yield "127.0.0.1", server.port
    del server


def test_nobody_listens_and_the_error_names_the_place() -> None:
    port = free_port()
    with pytest.raises(RankTimeout, match=rf"127\.0\.0\.1:{port} .*within 0\.2 s"):
        connect(TCPStore, {}, ("127.0.0.1", port), 0.2)


def test_who_listens_is_no_store_and_the_error_names_the_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} does not answer as a store"):
            connect(TCPStore, {}, ("127.0.0.1", port), 0.5)


def test_who_gives_up_waits_for_no_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(StoreError):
            connect(TCPStore, {}, silent.getsockname(), NET_S, give_up=lambda: True)
        assert time.monotonic() - began < NET_S / 4


def test_a_store_that_comes_up_late_is_waited_for() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(connect, TCPStore, {}, ("127.0.0.1", port), NET_S)
        server = TCPStore.serve(host_name="127.0.0.1", port=port)
        late.result(NET_S).put("key", b"value")
    assert server.get("key") == b"value"


def test_the_server_of_another_call_is_not_the_one(endpoint: Any) -> None:
    with pytest.raises(RankTimeout, match=rf"127\.0\.0\.1:{endpoint[1]} did not serve this call"):
        connect(TCPStore, {}, endpoint, 0.2, "call/served")
    connect(TCPStore, {}, endpoint, NET_S).put("call/served", b"1")
    assert connect(TCPStore, {}, endpoint, NET_S, "call/served").read("call/served") == b"1"


def test_a_broken_connection_wakes_its_waiter_and_no_other(endpoint: Any) -> None:
    broken, whole = (connect(TCPStore, {}, endpoint, NET_S) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(c.wait_for, "key", None) for c in (broken, whole)]
        broken.break_off()
        with pytest.raises(StoreError, match=f"127.0.0.1:{endpoint[1]}"):
            waits[0].result(NET_S)
        connect(TCPStore, {}, endpoint, NET_S).put("key", b"value")
        assert waits[1].result(NET_S) == b"value"


def test_a_wait_at_a_store_without_a_server_is_broken_off_too(tmp_path: Any) -> None:
    connection = connect(FileStore, {"file_name": str(tmp_path / "store")}, None, NET_S)
    connection.put("key", b"value")
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(connection.wait_for, "other", None)
        connection.break_off()
        with pytest.raises(StoreError, match="broken off"):
            wait.result(NET_S)
    assert connection.read("key") == b"value"
    assert connection.where == str(tmp_path / "store")


SERVER = """
import sys, time
from outlast.inprocess.store import TCPStore
server = TCPStore.serve(host_name="127.0.0.1", port=0)
print(server.port, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_an_operation_on_a_frozen_store_ends() -> None:
    command = [sys.executable, "-c", SERVER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        ExitStack() as stack,
    ):
        assert server.stdout is not None
        stack.callback(server.kill)
        connection = connect(TCPStore, {}, ("127.0.0.1", int(server.stdout.readline())), 0.5)
        assert connection.add("key", 1) == 1
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads
        with pytest.raises(StoreError, match="cannot be reached"):
            connection.add("key", 1)
