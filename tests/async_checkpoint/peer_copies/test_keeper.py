"""A keeper: what it accepts, what it holds, and what it sends."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_checkpoint.peer_copies.keepers import (
    ADDRESS,
    CHUNK_BYTES,
    FAST,
    TOKEN,
    Keeper,
    keepers,
    memory_of,
    snapshot_of,
)
from fake_clock import FakeClock
from inprocess.mutations import mutate
from outlast.async_checkpoint.peer_copies import transfer
from outlast.async_checkpoint.peer_copies.arrangement import Arrangement
from outlast.async_checkpoint.peer_copies.transfer import Connection, ConnectionRefused, fetch_copy
from outlast.async_checkpoint.writer.handover import StoredSnapshot
from outlast.errors import CheckpointError

SIZE = CHUNK_BYTES + 8192
NET_S = 60.0

Pair = list[Keeper]


@pytest.fixture(scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with keepers(tmp_path_factory.mktemp("keepers")) as pair:
        yield pair


@pytest.fixture
def pair(_running: Pair) -> Pair:
    """Two keepers, empty and with the usual token."""
    for keeper in _running:
        keeper.arrange()
        keeper.client.keep_only("")
    return _running


def test_a_copy_is_fetched_with_its_values(pair: Pair) -> None:
    one, two = pair
    with memory_of(SIZE) as memory:
        snapshot = snapshot_of(3, SIZE, values="__0_values.distcp")
        one.send(two, memory, snapshot, b"the values").result(NET_S)
        assert (one.held(), two.held()) == ([], [(3, 0)])
        copy = fetch_copy("b", (ADDRESS, two.port), TOKEN, "save3", 0)
        assert bytes(copy.memory.view) == bytes(memory.view)
        assert copy.values == b"the values"
        copy.memory.close()
        with pytest.raises(CheckpointError, match="rank 1's snapshot on host b cannot be fetched"):
            fetch_copy("b", (ADDRESS, two.port), TOKEN, "save3", 1)


def test_other_checksums_than_those_of_the_copying_thread_are_refused(pair: Pair) -> None:
    """The main process has taken checksums: a byte has changed since then."""
    one, two = pair
    with memory_of(SIZE) as memory:
        files = {"__0_0.distcp": {"size_bytes": SIZE, "checksums": ["0" * 32, "0" * 32]}}
        sent = one.send(two, memory, snapshot_of(3, SIZE, files=files))
        with pytest.raises(CheckpointError, match=f"damaged between bytes 0 and {CHUNK_BYTES}"):
            sent.result(NET_S)
        assert two.held() == []


def test_a_byte_that_changes_on_the_way_is_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    with memory_of(SIZE) as memory:
        one.send(two, memory, snapshot_of(3, SIZE)).result(NET_S)
        receive = Connection.receive_into

        def damaging(self: Connection, buffer: memoryview) -> None:
            receive(self, buffer)
            buffer[7] ^= 1

        monkeypatch.setattr(Connection, "receive_into", damaging)
        with pytest.raises(CheckpointError, match=r"on host b/__0_0.distcp is damaged"):
            fetch_copy("b", (ADDRESS, two.port), TOKEN, "save3", 0)
        mutate(monkeypatch, transfer.check_equal, "one != two", "False")
        fetch_copy("b", (ADDRESS, two.port), TOKEN, "save3", 0).memory.close()


def test_only_who_knows_the_token_is_served(pair: Pair) -> None:
    one, two = pair
    with memory_of(SIZE) as memory:
        one.send(two, memory, snapshot_of(3, SIZE)).result(NET_S)
        for token in ("b" * 64, ""):
            with pytest.raises(ConnectionRefused, match="does not belong to this job"):
                Connection.open(ADDRESS, two.port, token)
        with socket.create_connection((ADDRESS, two.port)) as rude:
            rude.sendall(b"x" * 64)  # as long as an answer to its challenge
            received = b""
            while more := rude.recv(4096):
                received += more
            assert len(received) == 32  # the challenge only
        # The other end must know it too: a rank sends its state to nothing else.
        two.arrange(token="b" * 64)
        with pytest.raises(CheckpointError, match="does not belong to this job"):
            one.send(two, memory, snapshot_of(4, SIZE)).result(NET_S)
        assert two.held() == [(3, 0)]


def test_a_keeper_holds_two_copies_of_a_rank_at_most(pair: Pair) -> None:
    """The one before, and the one that has arrived; even if it is never told what to release."""
    one, two = pair
    with memory_of(SIZE) as memory:
        for step in range(1, 5):
            one.send(two, memory, snapshot_of(step, SIZE)).result(NET_S)
        one.send(two, memory, snapshot_of(4, SIZE, rank=1)).result(NET_S)
        assert two.held() == [(3, 0), (4, 0), (4, 1)]
        assert memories(two.pid) == 3
        two.client.keep_only("save4")
        assert two.held() == [(4, 0), (4, 1)]
        assert memories(two.pid) == 2
        two.client.keep_only("")
        assert memories(two.pid) == 0


def memories(pid: int) -> int:
    """The number of snapshots that a process maps."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "outlast-snapshot" in line:
            found.add(line.split()[4])
    return len(found)


def test_a_copy_larger_than_the_memory_is_refused(pair: Pair) -> None:
    size = 1 << 50
    two = pair[1]
    connection = Connection.open(ADDRESS, two.port, TOKEN)
    offer = {"snapshot": snapshot_of(3, size), "size_bytes": size, "values_bytes": 0}
    connection.send_frame({"op": "offer", **offer})
    assert "of memory are available" in connection.receive_frame()["error"]
    connection.close()
    connection = Connection.open(ADDRESS, two.port, TOKEN)
    connection.send_frame({"op": "offer", **offer, "size_bytes": 4096})
    assert "is not within the 4096 bytes" in connection.receive_frame()["error"]
    connection.close()
    assert two.held() == []


@pytest.mark.slow
def test_a_receiver_that_dies_in_the_middle(tmp_path: Path) -> None:
    with keepers(tmp_path) as (one, two), memory_of(16 << 20) as memory:
        os.kill(two.pid, signal.SIGSTOP)  # accepts connections, and reads nothing
        sent = one.send(two, memory, snapshot_of(3, 16 << 20))
        reader = two.client._readers[-1]
        os.kill(two.pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=f"{ADDRESS}:{two.port}: "):
            sent.result(NET_S)
        reader.join(NET_S)
        assert not reader.is_alive()  # a request that comes before its end is lost with the keeper
        # The keeper is replaced, and holds nothing.
        two.arrange()
        assert two.held() == []
        one.send(two, memory, snapshot_of(4, 16 << 20)).result(NET_S)
        assert two.held() == [(4, 0)]


def test_a_copy_that_is_called_off_is_never_complete(pair: Pair) -> None:
    """A new arrangement calls off what is being sent: its buffer may be written to."""
    one, two = pair
    with memory_of(SIZE) as memory:
        one.arrange(bytes_per_s=100_000.0)
        sent = one.send(two, memory, snapshot_of(3, SIZE))
        one.arrange()
        with pytest.raises(CheckpointError, match="called off"):
            sent.result(NET_S)
        assert two.held() == []


class Waits(threading.Event):
    """An event that is never set; a wait for it takes no time but that of the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.advance(timeout or 0.0)
        return False


def test_the_bandwidth_is_limited() -> None:
    """At any time, no more was sent than the limit allows, apart from one small piece."""
    clock = FakeClock()
    sent: list[tuple[float, int]] = []

    class Network:
        def send(self, data: memoryview) -> None:
            sent.append((clock.now(), len(data)))

    rate = 1e6
    pace = transfer.Pace(rate, Waits(clock), clock)
    with memory_of(SIZE) as memory:
        stored = StoredSnapshot(snapshot_of(3, SIZE), b"", memory)
        transfer.send_content(cast(Any, Network()), stored, pace)
    total = 0
    for at, size in sent:
        assert total <= at * rate + 1
        total += size
    assert total == SIZE
    assert max(size for _, size in sent) <= 256 << 10
    clock.advance(100.0)  # time in which nothing was sent is not made up for
    pace.wait(1000)
    before = clock.now()
    pace.wait(1000)
    assert clock.now() == pytest.approx(before + 1000 / rate)


@pytest.mark.slow
def test_copies_are_handed_over_when_the_main_process_dies(tmp_path: Path) -> None:
    """To the next keeper of the host that is arranged."""
    tmp_path.chmod(0o700)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            leave_a_copy(tmp_path, writing)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    with keepers(tmp_path) as (one, two):
        assert one.held() + two.held() == []
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        two.arrange()
        one.arrange()
        assert (one.held(), two.held()) == ([], [(3, 0)])
        fetch_copy("b", (ADDRESS, two.port), TOKEN, "save3", 0).memory.close()
    assert not select.select([reading], [], [], NET_S)[1]
    os.close(reading)


def leave_a_copy(folder: Path, writing: int) -> None:
    one, two = Keeper(folder, "a", NET_S), Keeper(folder, "b", NET_S)
    one.arrange()
    two.arrange()
    with memory_of(SIZE) as memory:
        one.send(two, memory, snapshot_of(3, SIZE)).result(NET_S)
    os.write(writing, b"!")
    signal.pause()


@pytest.mark.parametrize("key", ["", "ab" * 32])
def test_the_store_alone_does_not_give_the_token_of_a_job_with_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OUTLAST_HOST_ADDR", ADDRESS)
    monkeypatch.setenv("OUTLAST_COPIES_KEY", key)
    in_store: dict[str, str] = {}
    ledger: Any = SimpleNamespace(agree=in_store.setdefault)
    with keepers(tmp_path) as (one, _):
        arranged = Arrangement.begin(one.client, ledger, ["a", "b"], FAST)
        other = Arrangement.begin(one.client, ledger, ["a", "b"], FAST)
        assert arranged.token == other.token
        port = one.client.port()
        Connection.open(ADDRESS, port, arranged.token).close()
        if key:
            with pytest.raises(ConnectionRefused, match="does not belong to this job"):
                Connection.open(ADDRESS, port, in_store["token"])
        else:
            assert arranged.token == in_store["token"]
