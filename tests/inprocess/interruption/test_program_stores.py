"""Stores that the program opened before the call: waits in them end, and they are renewed."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from outlast.inprocess.interruption.program_stores import ProgramStores
from outlast.system.sockets import RESTARTED, awaited, socket_inodes
from procs import NET_S, free_port

# Longer than a test may take: no wait that ends has ended by this.
LIMIT = datetime.timedelta(hours=1)


def serve(port: int = 0) -> Any:
    return dist.TCPStore("127.0.0.1", port, 1, True, LIMIT, wait_for_workers=False)


def open_store(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)


def wait_in(
    store: Any, stores: ProgramStores, first: Callable[[], object] = lambda: None
) -> type[Exception] | None:
    """Waits for a key that never comes, until `stores` ends that, after a call of `first`; returns
    the error.
    """
    ended = threading.Event()

    def end() -> None:
        first()
        while not ended.wait(0.001):
            stores.end_wait()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        store.get("never")
    except dist.DistError as e:
        return type(e)
    finally:
        ended.set()
        thread.join(NET_S)
    return None


@pytest.mark.parametrize("prefixes", [0, 1, 2])
def test_a_wait_in_a_given_store_is_ended_and_the_store_serves_again(prefixes: int) -> None:
    server = serve()
    store: Any = open_store(server.port)
    for each in range(prefixes):
        store = dist.PrefixStore(str(each), store)
    store.set("key", "value")
    stores, before = ProgramStores(3, ([store],), {"store": (store,)}), socket_inodes()
    for _ in range(3):
        assert wait_in(store, stores) is not None
        stores.watch()
        stores.replace()
        assert store.get("key") == b"value"
    after = socket_inodes()
    assert len(after) <= len(before) + 1  # the server's end of the last one may close later


def test_a_wait_that_goes_on_after_a_stop_of_the_process_is_ended() -> None:
    """The kernel restarts such a wait by another system call."""
    thread = threading.get_native_id()

    def call() -> bytes:
        return Path(f"/proc/self/task/{thread}/syscall").read_bytes().split()[0]

    def stop() -> None:
        while awaited(thread) is None:
            time.sleep(0.001)
        while call() != RESTARTED:
            subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; kill -CONT {os.getpid()}"])

    server = serve()
    store = open_store(server.port)
    assert wait_in(store, ProgramStores(store), stop) is not None


def test_another_store_of_the_same_server_is_not_touched() -> None:
    server = serve()
    given, other = open_store(server.port), open_store(server.port)
    stores = ProgramStores(given)
    del other
    with open(os.devnull) as file:  # has the descriptor of that store's connection
        assert wait_in(given, stores) is not None
        stores.watch()
        stores.replace()
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(os.devnull))
    given.set("key", "value")
    assert given.get("key") == b"value"


def test_a_store_is_renewed_by_a_server_that_waits_for_it() -> None:
    first = serve()
    port, stores = first.port, None
    store = open_store(port)
    stores = ProgramStores(store)
    del first
    with contextlib.suppress(dist.DistError):
        store.get("never")
    stores.watch()
    again = dist.TCPStore("127.0.0.1", port, 2, True, LIMIT, wait_for_workers=True)
    stores.replace()
    again.set("key", "value")
    assert store.get("key") == b"value"


@contextlib.contextmanager
def served(port: int, clients: int = 0) -> Iterator[int]:
    """A server in another process, which is killed; yields a pipe that is readable once it serves.
    With a number of `clients`, it waits for these.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(dist.DistError):
            store = dist.TCPStore("127.0.0.1", port, clients + 1, True, LIMIT, clients > 0)
            os.write(writable, b"x")
            threading.Event().wait()
            del store
        os._exit(1)
    try:
        yield readable
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(readable)
        os.close(writable)


def given_store(port: int, timeout: datetime.timedelta = LIMIT) -> Any:
    with served(port) as ready:
        assert os.read(ready, 1)
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)


def comes(ready: int) -> bool:
    return bool(select.select([ready], [], [], NET_S / 4)[0])


def test_a_store_is_renewed_by_the_replacement_of_a_replacement() -> None:
    port = free_port()
    store = given_store(port)
    stores = ProgramStores(store)
    stores.watch()
    with served(port, clients=1) as ready:  # lost before its rank has joined
        assert comes(ready)
    with served(port, clients=1) as ready:
        assert comes(ready)
        stores.replace()
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.slow
def test_a_replacement_may_take_longer_than_the_timeout_of_the_store() -> None:
    port = free_port()
    store = given_store(port, datetime.timedelta(seconds=1))
    stores = ProgramStores(store)
    stores.watch()
    threading.Event().wait(4)  # torch tries twice
    with served(port, clients=1) as ready:
        assert comes(ready)
        stores.replace()
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_store_that_the_program_gives_up_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "store", serve(), raising=False)
    port, stores = main.store.port, ProgramStores()  # type: ignore[attr-defined]
    main.store = None  # type: ignore[attr-defined]
    assert serve(port).port == port
    stores.close()


def test_only_small_containers_are_looked_into() -> None:
    class Config(dict[str, Any]):
        values: Any = 3

    server = serve()
    store = open_store(server.port)
    for given in ([store], Config(store=store)):
        assert ProgramStores(given)._clients
    assert not ProgramStores([store] * 1_001)._clients


def test_what_a_thread_waits_for_is_known_only_if_it_is_a_descriptor() -> None:
    asleep, wake = threading.Event(), threading.Event()
    found: list[int] = []

    def sleep() -> None:
        found.append(threading.get_native_id())
        asleep.set()
        wake.wait()

    thread = threading.Thread(target=sleep)
    thread.start()
    asleep.wait()
    assert awaited(found[0]) is None
    wake.set()
    thread.join()
    assert awaited(found[0]) is None
