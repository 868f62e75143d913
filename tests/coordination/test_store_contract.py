"""The contract of every store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from etcd_cluster import Cluster, etcd_stores, require_etcd
from outlast.coordination.ops import Op, perform_on
from outlast.coordination.stores import tcp_client
from outlast.coordination.stores.store import KeyTimeout, MemoryStore, Store
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.coordination.stores.torch_store import TorchStore
from outlast.errors import StoreError
from outlast.launch.hosts.host_group import GroupSpec
from outlast.launch.hosts.replicated import founding
from outlast.launch.hosts.replicated.group import ReplicatedGroup
from outlast.system.lease_page import LeasePage
from procs import free_port

Connect = Callable[[], Store]
NET_S = 60.0
THREE = pytest.param("etcd of three", marks=pytest.mark.slow)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LeasePage]:
    page = LeasePage.create(tmp_path)
    yield page
    page.close()


@pytest.fixture(
    params=[
        "memory",
        "tcp",
        "client",
        "tcp without libuv",
        "without libuv, client",
        "file",
        "etcd",
        THREE,
        "group",
        "host server",
        "host server, client",
    ]
)
def connect(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    page: LeasePage,
    etcd_if_installed: Cluster | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Connect]:
    """Opens connections to the same store, each for one thread."""
    if request.param == "memory":
        store = MemoryStore()
        yield lambda: store
        return
    if request.param == "etcd of three":
        with Cluster(3) as cluster, etcd_stores(cluster) as make_etcd:
            yield make_etcd
        return
    if request.param == "etcd":
        require_etcd()
        assert etcd_if_installed is not None
        with etcd_stores(etcd_if_installed) as make_etcd:
            yield make_etcd
        return
    group = None
    if request.param in ("group", "host server", "host server, client"):
        monkeypatch.setattr(founding, "SILENCE_S", 0.0)  # no other group is alive
        group = ReplicatedGroup(
            GroupSpec(
                run_id="contract",
                endpoints=(("127.0.0.1", free_port()),),
                page=page,
                lease_s=NET_S,
            )
        )
        group.start()
    if request.param == "group":
        assert group is not None
        yield lambda: group.store
        group.close(leave=True)
        return
    made: list[TorchStore] = []
    path = str(tmp_path / "store")
    held: Any = None
    if request.param == "file":
        held = dist.FileStore(path, -1)  # the last connection to close deletes the file
    elif group is None:
        libuv = "without libuv" not in request.param
        held = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv
        )
    port = group.me.store_port if group is not None else getattr(held, "port", 0)
    if request.param.endswith("client"):
        clients: list[TcpClient] = []

        def client() -> Store:
            clients.append(TcpClient("127.0.0.1", port, NET_S))
            return clients[-1]

        yield client
        for each in clients:
            each.close()
        if group is not None:
            group.close(leave=True)
        return

    def make() -> Store:
        made.append(
            TorchStore(
                dist.TCPStore("127.0.0.1", port, wait_for_workers=False), f"127.0.0.1:{port}"
            )
            if port
            else TorchStore(dist.FileStore(path, -1), path)
        )
        return made[-1]

    yield make
    for connection in made:  # pytest still holds some
        connection.torch_store = None
    del held
    if group is not None:
        group.close(leave=True)


@pytest.fixture
def store(connect: Connect) -> Store:
    return connect()


def test_a_table_of_bytes(store: Store) -> None:
    assert store.read("k") is None
    store.put("k", b"1")
    store.put("k", b"2")
    assert store.read("k") == b"2"
    assert store.read("other") is None
    store.delete("k")
    assert store.read("k") is None
    store.delete("k")  # deleting again has no effect
    store.put("k", b"3")
    assert store.read("k") == b"3"


def test_several_keys_are_deleted_at_once(store: Store) -> None:
    for key in ("a", "b", "c"):
        store.put(key, key.encode())
    store.delete("c", "nobody's", "a")
    assert [store.read(key) for key in ("a", "b", "c")] == [None, b"b", None]


def test_values_are_whatever_is_text(store: Store) -> None:
    value = '{"a": [1, "two\\n", "\u00fc\u20ac"]}\n'.encode() * 5000
    store.put("k", value)
    assert store.read("k") == value
    assert store.wait_for("k", NET_S) == value


def test_the_first_claim_wins(store: Store) -> None:
    assert store.claim("k", b"a") == b"a"
    assert store.claim("k", b"b") == b"a"
    assert store.read("k") == b"a"
    store.put("set", b"x")
    assert store.claim("set", b"y") == b"x"


def test_numbers(store: Store) -> None:
    assert store.add("n", 1) == 1
    assert store.add("n", 0) == 1
    assert store.add("n", 41) == 42
    assert store.read("n") == b"42"
    assert store.add("zero", 0) == 0


def test_appending(store: Store) -> None:
    store.append("log", b"a\n")
    store.append("log", b"b\n")
    assert store.read("log") == b"a\nb\n"
    store.put("log", b"")
    store.append("log", b"c\n")
    assert (store.read("log") or b"").endswith(b"c\n")


def test_what_is_there_is_not_waited_for(store: Store) -> None:
    store.put("k", b"v")
    assert store.wait_for("k", 0.0) == b"v"
    assert store.wait_for("k", None) == b"v"


@pytest.mark.parametrize("timeout", [0.0, 0.02])
def test_a_wait_ends_with_its_timeout(store: Store, timeout: float) -> None:
    with pytest.raises(KeyTimeout, match="never"):
        store.wait_for("never", timeout)
    store.put("never", b"after all")  # and the connection still works
    assert store.wait_for("never", NET_S) == b"after all"


@pytest.mark.parametrize("how", ["put", "claim", "append", "add"])
@pytest.mark.parametrize("timeout", [NET_S, None])
def test_a_waiter_is_woken(connect: Connect, how: str, timeout: float | None) -> None:
    waiters, maker = [connect() for _ in range(3)], connect()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(s.wait_for, "k", timeout) for s in waiters]
        if how == "add":
            maker.add("k", 7)
        else:
            getattr(maker, how)("k", b"7")
        assert [w.result() for w in waiting] == [b"7"] * 3


def test_looking_and_other_keys_wake_nobody(connect: Connect) -> None:
    waiter, other = connect(), connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait_for, "k", None)
        for n in range(50):
            assert other.read("k") is None
            other.put(f"k{n}", b"1")
            other.delete("k")
            assert not waiting.done()
        other.put("k", b"v")
        assert waiting.result() == b"v"


def run_all(connect: Connect, work: Callable[[Store, int], Any], count: int = 8) -> list[Any]:
    """Runs `work` in threads that start together, each with its own connection."""
    together = threading.Barrier(count)
    stores = [connect() for _ in range(count)]

    def begin(number: int) -> Any:
        together.wait()
        return work(stores[number], number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_one_claim_wins_among_many(connect: Connect) -> None:
    for n in range(10):
        held = run_all(connect, lambda s, i, n=n: s.claim(f"k{n}", str(i).encode()))
        assert len(set(held)) == 1


def test_nothing_that_many_append_or_add_is_lost(connect: Connect) -> None:
    def work(store: Store, number: int) -> list[int]:
        sums = []
        for n in range(20):
            store.append("log", f"{number}.{n}\n".encode())
            sums.append(store.add("n", 1))
        return sums

    sums = [total for some in run_all(connect, work) for total in some]
    assert sorted(sums) == list(range(1, 161))
    lines = (connect().read("log") or b"").decode().split()
    assert sorted(lines) == sorted(f"{i}.{n}" for i in range(8) for n in range(20))
    for number in range(8):  # each thread's, in its order
        mine = [line for line in lines if line.startswith(f"{number}.")]
        assert mine == [f"{number}.{n}" for n in range(20)]


class Deleting:
    """A torch store on which another process deletes a key as soon as it was seen."""

    def __init__(self, store: Any, delete: Callable[[], None]) -> None:
        self._store, self._delete = store, delete

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        self._delete()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_read_does_not_wait_for_a_key_that_is_deleted_meanwhile(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id == "without libuv, client":
        pytest.skip("this server closes a connection that asks for an absent value")
    store, other = connect(), connect()
    store.put("k", b"v")
    store.put("empty", b"")
    if isinstance(store, TorchStore):
        store.torch_store = Deleting(store.torch_store, lambda: other.delete("k"))
    elif isinstance(store, TcpClient):
        present = tcp_client._present

        def then_deleted(connection: Any, keys: Sequence[str]) -> list[str]:
            found = present(connection, keys)
            monkeypatch.setattr(tcp_client, "_present", present)
            other.delete("k")
            return found

        monkeypatch.setattr(tcp_client, "_present", then_deleted)
    else:
        other.delete("k")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, "k")
        try:
            assert reading.result(NET_S / 4) is None
        finally:
            other.put("k", b"v")  # ends a read that waits
    assert other.read("empty") == b""


OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "put": lambda s: s.put("k", b"v"),
    "claim": lambda s: s.claim("k", b"v"),
    "read": lambda s: s.read("k"),
    "wait_for": lambda s: s.wait_for("k", None),
    "add": lambda s: s.add("k", 1),
    "append": lambda s: s.append("k", b"v"),
    "delete": lambda s: s.delete("k"),
}


@pytest.mark.parametrize("client", ["torch", "own"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_error_names_the_place_of_a_store_that_is_gone(name: str, client: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = f"127.0.0.1:{server.port}"
    store: Store = TcpClient("127.0.0.1", server.port, NET_S)
    if client == "torch":
        store = TorchStore(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False), where)
    store.put("there", b"1")
    del server
    with pytest.raises(StoreError, match=where):
        for _ in range(3):  # the first write may still fit in a buffer
            OPERATIONS[name](store)


def test_a_wait_ends_when_the_store_does() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = f"127.0.0.1:{server.port}"
    store = TorchStore(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False), where)
    store.put("there", b"1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait_for, "never", None)
        del server
        with pytest.raises(StoreError, match=where):
            waiting.result()


def test_an_addition_with_a_read_of_another_key(connect: Connect) -> None:
    store = connect()
    both = Op("add_and_read", "n", amount=2, others=("k",))
    assert perform_on(store)(both) == (2, b"")
    store.put("k", b"v")
    assert perform_on(store)(both) == (4, b"v")


def test_several_keys_are_read(connect: Connect) -> None:
    store = connect()
    store.put("k", b"v")
    several = Op("read_all", "k", others=("k", "absent", "k"))
    assert perform_on(store)(several) == [b"v", None, b"v"]
