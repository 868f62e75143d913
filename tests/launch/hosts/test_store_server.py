"""The store server of a host: torch's client, real process groups, clients that misbehave."""

from __future__ import annotations

import datetime
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.job_output import assert_never_together, errors, full, views
from launch.hosts.served_store import NET_S, MemoryUpstream, ServedStore, ServerProcess, served
from outlast.coordination.replicated.operations import (
    Failed,
    Operation,
    OperationStore,
    Result,
)
from outlast.coordination.stores.store import HOST_KEYS, KeyTimeout
from outlast.coordination.stores.tcp_client import Query, TcpClient
from outlast.errors import StoreError
from outlast.inprocess.store import TCPStore, connect
from outlast.launch.hosts.server import client_connection
from procs import Job
from zygote import Zygote

HERE = Path(__file__).parent
MAGIC = struct.pack("=BI", Query.VALIDATE, 0x3C85F7CE)
SHORT = datetime.timedelta(milliseconds=20)


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    """A server in its own process, without keys."""
    process.new_attempt()
    return process


@pytest.fixture
def near() -> Iterator[ServedStore]:
    """A server in a thread of this process."""
    with served() as store:
        yield store


def torch_client(port: int, **kwargs: Any) -> Any:
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **kwargs)


def key(name: str) -> bytes:
    return struct.pack("=Q", len(name)) + name.encode()


# -------------------------------------------------------------------- real clients
def test_every_call_of_torchs_client(server: ServerProcess) -> None:
    store = torch_client(server.port)
    store.set("k", b"\xff\0")
    assert store.get("k") == b"\xff\0"
    assert store.compare_set("k2", "", "v") == b"v"
    assert store.compare_set("k2", "v", "w") == b"w"
    assert store.compare_set("k2", "v", "x") == b"w"
    assert store.compare_set("absent", "v", "x") == b"v"  # as torch's server answers
    assert store.add("n", 3) == 3
    assert store.add("n", -5) == -2
    assert store.check(["k", "k2"])
    assert not store.check(["k", "absent"])
    assert store.check([])
    store.append("log", "a")
    store.append("log", "b")
    assert store.get("log") == b"ab"
    store.multi_set(["m1", "m2"], ["1", "2"])
    assert store.multi_get(["m2", "m1"]) == [b"2", b"1"]
    store.wait(["m1", "n"], SHORT)
    assert store.num_keys() == 6
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert store.num_keys() == 5
    large = bytes(range(256)) * 20_000
    store.set("large", large)
    if hasattr(store, "clone"):  # not in torch 2.6
        assert store.clone().get("large") == large
    store.set_timeout(datetime.timedelta(seconds=NET_S))
    if hasattr(store, "list_keys"):  # since torch 2.12
        assert sorted(store.list_keys()) == ["k2", "large", "log", "m1", "m2", "n"]


def test_a_wait_that_is_given_up_leaves_the_connection_usable(
    server: ServerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    store, other = torch_client(server.port), torch_client(server.port)
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            store.wait(["never", "neither"], SHORT)
    other.set("never", "1")
    with pytest.raises(dist.DistStoreError):
        store.wait(["never", "neither"], SHORT)
    other.set("neither", "1")
    store.wait(["never", "neither"])
    assert store.get("never") == b"1"
    capfd.readouterr()  # torch logs the timeouts


def test_torchs_barriers(server: ServerProcess, capfd: pytest.CaptureFixture[str]) -> None:
    if not hasattr(dist.TCPStore, "barrier"):
        pytest.skip("this torch has no barrier on a store")
    stores = [torch_client(server.port) for _ in range(3)]
    with pytest.raises(dist.DistStoreError):
        stores[0].barrier("b", 2, SHORT)
    stores[1].barrier("b", 2, datetime.timedelta(seconds=NET_S))
    with ThreadPoolExecutor(3) as pool:
        for passed in [pool.submit(s.barrier, "c", 3) for s in stores]:
            passed.result(NET_S)
    assert stores[0].num_keys() == 2
    assert torch_client(server.port, world_size=1).check(["b", "c"])
    capfd.readouterr()


def test_all_workers_are_waited_for(server: ServerProcess) -> None:
    with ThreadPoolExecutor(3) as pool:
        for store in pool.map(
            lambda rank: dist.TCPStore("127.0.0.1", server.port, world_size=3), range(3)
        ):
            assert store.num_keys() == 1


def test_the_connection_of_a_rank_is_broken_off_during_a_wait(server: ServerProcess) -> None:
    connection = connect(TCPStore, {}, ("127.0.0.1", server.port), NET_S)
    connection.put("there", b"1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.wait_for, "never", None)
        while not waiting.running():
            pass
        connection.break_off()
        with pytest.raises(StoreError, match=f"127.0.0.1:{server.port}"):
            waiting.result(NET_S)
    connection.close()


def test_a_rank_reads_with_one_request(near: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_STORE", f"127.0.0.1:{near.port}")
    connection = connect(TCPStore, {}, ("127.0.0.1", near.port), NET_S)
    connection.put("k", b"1")
    assert connection.add("n", 1) == 1
    sent = near.call(lambda: len(upstream_of(near).sent))
    assert connection.read("k") == b"1"
    assert connection.read("absent") is None
    assert near.call(lambda: len(upstream_of(near).sent)) == sent + 2
    assert connection.wait_for("k", NET_S) == b"1"
    connection.close()


def test_a_rank_waits_with_one_request(near: ServedStore) -> None:
    upstream = upstream_of(near)
    client, first = (TcpClient("127.0.0.1", near.port, NET_S) for _ in range(2))
    client.host_server = first.host_server = True
    client.put("k", b"1")
    assert client.wait_for("k", NET_S) == b"1"
    assert [op.name for op in near.call(lambda: upstream.sent)] == ["put", "wait_for"]
    with pytest.raises(KeyTimeout):
        client.wait_for("never", 0.0)
    assert client.wait_for("k", 0.0) == b"1"
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(("127.0.0.1", near.port), NET_S) as second,
    ):
        upstream.on_wait = threading.Event()
        waiting = pool.submit(first.wait_for, "late", NET_S)
        assert upstream.on_wait.wait(NET_S)
        # This one joins the wait that has been sent.
        add = struct.pack("=B", Query.ADD) + key("/n") + struct.pack("=q", 1)
        second.sendall(MAGIC + add + struct.pack("=B", Query.AWAIT) + key("/late"))
        assert second.recv(8, socket.MSG_WAITALL) == struct.pack("=q", 1)
        del upstream.sent[:]
        client.put("late", b"new")
        assert waiting.result(NET_S) == b"new"
        assert second.recv(11, socket.MSG_WAITALL) == key("new")
        assert [op.name for op in near.call(lambda: upstream.sent)] == ["put"]
    for each in (client, first):
        each.close()


def test_an_arrival_at_a_barrier_is_one_message(near: ServedStore) -> None:
    upstream = upstream_of(near)
    client = TcpClient("127.0.0.1", near.port, NET_S)
    client.host_server = True
    assert client.add_and_read("count", 2, "ledger") == (2, b"")
    client.put("ledger", b"lost")
    client.read("ledger")
    before = near.call(lambda: len(upstream.sent))
    client.append("arrived", b"me")
    assert client.add_and_read("count", 1, "ledger") == (3, b"lost")
    parts = [op.operations or (op,) for op in near.call(lambda: upstream.sent)[before:]]
    assert [op.name for part in parts for op in part] == ["append", "add", "read"]
    assert len(parts) <= 2  # 1, unless the client was stopped between the two requests
    before = near.call(lambda: len(upstream.sent))
    assert client.read_all("arrived", "ledger", "absent") == [b"me", b"lost", None]
    [together] = near.call(lambda: upstream.sent)[before:]
    assert [op.name for op in together.operations] == ["read"] * 3
    client.close()
    with socket.create_connection(("127.0.0.1", near.port), NET_S) as other:
        other.sendall(MAGIC + struct.pack("=BQ", Query.ADD_AND_READ, 1) + key("/n"))
        assert other.recv(1) == b""  # two keys are needed


def test_gloo_over_env(server: ServerProcess, tmp_path: Path, zygote: Zygote) -> None:
    env = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = HERE / "scripts" / "gloo_env.py"
    with Job(tmp_path, script, nprocs=3, env=env, spawn=zygote.spawn) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        for rank in range(3):
            assert job.lines(rank) == [{"total": 3.0, "objects": 3}]


def test_a_restart_in_place(server: ServerProcess, tmp_path: Path, zygote: Zygote) -> None:
    env = {"MASTER_PORT": str(server.port), "OUTLAST_STORE": f"127.0.0.1:{server.port}"}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    script = HERE.parents[1] / "inprocess" / "scripts" / "faults.py"
    args = ("one_fails", "kill")
    with Job(tmp_path, script, nprocs=3, env=env, args=args, spawn=zygote.spawn) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: -9, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}
        assert_never_together(job)


def test_the_keys_of_a_host_stay_there(near: ServedStore) -> None:
    client, waiter = (TcpClient("127.0.0.1", near.port, NET_S) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait_for, HOST_KEYS + "late", None)
        assert client.add(HOST_KEYS + "beat/0", 2) == 2
        client.append(HOST_KEYS + "members", b"0\n")
        assert client.read(HOST_KEYS + "members") == b"0\n"
        client.put(HOST_KEYS + "late", b"1")
        assert waiting.result(NET_S) == b"1"
    assert client.add("n", 1) == 1
    assert [op.key for op in near.call(lambda: upstream_of(near).sent)] == ["w/0//n"]
    with pytest.raises(KeyTimeout):
        client.wait_for(HOST_KEYS + "never", 0.01)
    near.call(lambda: near.server.new_attempt(1))
    for each in (client, waiter):
        each.close()
        assert each.read(HOST_KEYS + "members") is None
        each.close()


# -------------------------------------------------------------------- attempts and failures
def test_a_new_attempt_ends_connections_and_has_no_keys(near: ServedStore) -> None:
    client = TcpClient("127.0.0.1", near.port, NET_S)
    client.put("k", b"1")
    assert client.read("k") == b"1"
    near.call(lambda: near.server.new_attempt(1))
    with pytest.raises(StoreError, match="cannot be reached"):
        client.read("k")
    assert client.read("k") is None  # another connection
    client.put("k", b"2")
    assert client.read("k") == b"2"
    assert upstream_of(near).model.table == {"w/0//k": b"1", "w/1//k": b"2"}
    client.close()


def upstream_of(near: ServedStore) -> MemoryUpstream:
    upstream = near.server._stores._all_hosts._upstream
    assert isinstance(upstream, MemoryUpstream)
    return upstream


@pytest.mark.parametrize("how", ["the server is told", "an operation fails"])
def test_clients_get_an_error_when_the_host_must_not_act(near: ServedStore, how: str) -> None:
    waiter, other = (TcpClient("127.0.0.1", near.port, NET_S) for _ in range(2))
    other.put("k", b"1")
    assert other.read("k") == b"1"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait_for, "never", None)
        while not near.call(lambda: upstream_of(near).waiting):
            pass
        if how == "an operation fails":
            near.call(lambda: setattr(upstream_of(near), "failed", "the lease is over"))
            with pytest.raises(StoreError):
                other.read("k")
        near.call(lambda: near.server.fail("the lease is over"))
        with pytest.raises(StoreError):
            waiting.result(NET_S)
        with pytest.raises(StoreError):
            other.read("k")
    waiter.close()
    other.close()


# -------------------------------------------------------------------- clients that misbehave
def test_a_client_that_disconnects_ends_its_waits(near: ServedStore) -> None:
    with socket.create_connection(("127.0.0.1", near.port)) as stranger:
        stranger.sendall(MAGIC + bytes([Query.WAIT]) + struct.pack("=Q", 1) + key("/k"))
        while not near.call(lambda: upstream_of(near).waiting):
            pass
    while near.call(lambda: upstream_of(near).waiting):
        pass
    assert not near.call(lambda: near.server._connections)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + b"\xee",
        MAGIC + bytes([Query.GET]) + struct.pack("=Q", 1 << 60),
        MAGIC + bytes([Query.QUEUE_LEN]) + key("/q"),
        MAGIC + bytes([Query.ADD]) + key("/word") + struct.pack("=q", 1),
        MAGIC + bytes([Query.ADD]) + key("/huge") + struct.pack("=q", 1),
    ],
)
def test_only_the_connection_of_a_malformed_request_is_closed(
    near: ServedStore, sent: bytes
) -> None:
    client = TcpClient("127.0.0.1", near.port, NET_S)
    client.put("word", b"no number")
    client.put("huge", str((1 << 63) - 1).encode())
    assert client.read("huge")
    with socket.create_connection(("127.0.0.1", near.port), timeout=NET_S) as stranger:
        stranger.sendall(sent)
        assert stranger.recv(1) == b""
    assert client.read("word") == b"no number"
    client.close()


def test_a_client_that_does_not_read_is_not_served_further(
    near: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "_UNREAD_BYTES", 1000)
    client = TcpClient("127.0.0.1", near.port, NET_S)
    value = b"x" * (1 << 20)
    client.put("k", value)
    assert client.read("k") == value
    get, count = bytes([Query.GET]) + key("/k"), 100
    answer = struct.pack("=Q", len(value)) + value
    with socket.create_connection(("127.0.0.1", near.port), timeout=NET_S) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(MAGIC + get * count)

        def unsent() -> list[int]:
            return near.call(lambda: [len(c._unsent) for c in near.server._connections])

        while max(unsent()) < 1000:
            pass
        reads = near.call(lambda: len(upstream_of(near).sent))
        assert client.read("k") == value  # others are served
        assert max(unsent()) <= len(answer)
        received = bytearray()
        while len(received) < count * len(answer):
            received += slow.recv(1 << 20)
        assert received == answer * count
        assert near.call(lambda: len(upstream_of(near).sent)) >= reads + count // 2
    client.close()


def test_requests_without_an_answer_are_performed_in_their_order(near: ServedStore) -> None:
    append = bytes([Query.APPEND]) + key("/log")
    sent = b"".join(append + key(f"{n} ") for n in range(2000))
    with socket.create_connection(("127.0.0.1", near.port), timeout=NET_S) as stranger:
        stranger.sendall(MAGIC + sent + bytes([Query.GET]) + key("/log"))
        expected = b"".join(b"%d " % n for n in range(2000))
        received = b""
        while len(received) < 8 + len(expected):
            received += stranger.recv(1 << 16)
    assert received[8:] == expected
    assert len(upstream_of(near).sent) < 100  # combined


def test_many_clients_at_once(near: ServedStore) -> None:
    together = threading.Barrier(16)

    def work(number: int) -> list[int]:
        client = TcpClient("127.0.0.1", near.port, NET_S)
        client.connect()
        together.wait()
        sums = [client.add("n", 1) for _ in range(20)]
        client.append("log", b"%d\n" % number)
        client.close()
        return sums

    with ThreadPoolExecutor(16) as pool:
        sums = [total for some in pool.map(work, range(16)) for total in some]
    assert sorted(sums) == list(range(1, 321))


def test_operations_together_fail_together() -> None:
    class Store(OperationStore):
        def perform(self, operation: Operation, timeout: float | None = None) -> Result:
            return [b"1", Failed("the lease is over")]

    with pytest.raises(StoreError, match="the lease is over"):
        Store().read_all("a", "b")
