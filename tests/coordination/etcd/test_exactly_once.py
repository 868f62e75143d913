"""On real etcd: answers that are lost, requests that arrive late, and a lease that is over."""

from __future__ import annotations

import contextlib
import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from etcd_cluster import NET_S, Cluster
from outlast.coordination.replicated.operations import Failed, Keys, Operation
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Refused, Security
from outlast.coordination.stores.etcd.operations import Fence, LeaseOver, NoAnswer
from outlast.coordination.stores.etcd.store import EtcdStore
from outlast.errors import StoreError

THREADS, ROUNDS = 3, 10


class LossyClient(EtcdClient):
    """Loses requests and answers, and sends requests once more, later."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster.endpoints, Security())
        self._random = random.Random(seed)
        self._late: list[tuple[str, Any]] = []
        self.lost = 0

    def call(self, path: str, body: Any, limit: float | None = None) -> Any:
        while self._late and self._random.random() < 0.5:
            with contextlib.suppress(NoAnswer, Refused, IndexError):
                super().call(*self._late.pop(self._random.randrange(len(self._late))))
        fate = self._random.choice(["answered"] * 5 + ["lost", "no answer", "late", "twice"])
        if fate in ("late", "twice"):
            self._late.append((path, body))
        if fate in ("lost", "late"):
            self.lost += 1
            raise NoAnswer("the request was lost")
        answer = super().call(path, body, limit)
        if fate == "no answer":
            self.lost += 1
            raise NoAnswer("the answer was lost")
        return answer


@pytest.fixture
def root() -> str:
    return f"/outlast/{uuid.uuid4().hex}/"


@contextlib.contextmanager
def store_on(client: EtcdClient, root: str, **options: Any) -> Iterator[EtcdStore]:
    with contextlib.closing(client):
        store = EtcdStore(client, root, uuid.uuid4().hex, **options)
        with contextlib.closing(store):
            yield store


def test_nothing_is_lost_or_done_twice_whatever_becomes_of_requests_and_answers(
    etcd: Cluster, root: str
) -> None:
    def work(number: int) -> tuple[list[int], list[int], list[bytes], int]:
        client = LossyClient(etcd, number)
        with store_on(client, root) as store:
            sums, ones, claimed = [], [], []
            for n in range(ROUNDS):
                store.append("log", b"%d.%d\n" % (number, n))
                ones.append(store.add("ones", 1))
                sums.append(store.add("sums", number + 1))
                claimed.append(store.claim(f"claim{n}", b"%d" % number))
            return ones, sums, claimed, client.lost

    with ThreadPoolExecutor(THREADS) as pool:
        done = list(pool.map(work, range(THREADS)))
    assert sum(lost for *_, lost in done) > ROUNDS  # it was tried
    ones = [n for some, *_ in done for n in some]
    assert sorted(ones) == list(range(1, THREADS * ROUNDS + 1))
    # Sorted, the sums grow by the amounts of those who got them.
    sums = sorted((total, number + 1) for number, each in enumerate(done) for total in each[1])
    assert [total for total, _ in sums] == [
        sum(amount for _, amount in sums[: n + 1]) for n in range(len(sums))
    ]
    assert len({tuple(each[2]) for each in done}) == 1
    with store_on(etcd.client(), root) as store:
        lines = (store.read("log") or b"").decode().split()
    assert sorted(lines) == sorted(f"{i}.{n}" for i in range(THREADS) for n in range(ROUNDS))
    for number in range(THREADS):
        mine = [line for line in lines if line.startswith(f"{number}.")]
        assert mine == [f"{number}.{n}" for n in range(ROUNDS)]


@pytest.mark.slow
def test_replacing_is_exact_too(etcd: Cluster, root: str) -> None:
    """Each thread increments a number by `compare_set`; every success is one increment."""

    def work(number: int) -> int:
        successes = 0
        with store_on(LossyClient(etcd, number), root) as store:
            while successes < 5:
                held = store.read("n") or b""
                mine = b"%d:%d.%d" % (int(held.partition(b":")[0] or b"0") + 1, number, successes)
                replaced = store.perform(Operation("compare_set", "n", mine, expected=held))
                successes += replaced == mine
        return successes

    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(work, range(THREADS)))
    with store_on(etcd.client(), root) as store:
        assert (store.read("n") or b"").startswith(b"%d:" % total)


class CountingClient(EtcdClient):
    calls = 0

    def call(self, path: str, body: Any, limit: float | None = None) -> Any:
        self.calls += 1
        return super().call(path, body, limit)


def batch(*operations: Operation) -> Operation:
    return Operation("batch", operations=operations)


def test_a_batch_is_one_request_and_others_see_all_of_it_or_nothing(
    etcd: Cluster, root: str
) -> None:
    client = CountingClient(etcd.endpoints, Security())
    never = b"no value"
    with store_on(client, root) as store:
        operations = (
            Operation("append", "log", b"a"),
            Operation("add", "n", amount=1),
            Operation("add", "m", amount=7),
            Operation("compare_set", "over", b"restart"),
            Operation("claim", "c", b"mine"),
            Operation("read", "ledger"),
            Operation("compare_set", "x", never, expected=never),
            Operation("check", "y"),
            Operation("delete", "z"),
            Operation("put", "p", b"v"),
        )
        results = [None, 1, 7, b"restart", b"mine", None, None, 0, 0, None]
        assert store.perform(batch(*operations)) == results
        assert client.calls == 1
        written = {store.look(key)[0] for key in ("log", "n", "m", "over", "c", "p")}
        assert written == {b"a", b"1", b"7", b"restart", b"mine", b"v"}
        reads = batch(Operation("read", "log"), Operation("read", "over"), Operation("check", "p"))
        before = client.calls
        assert store.perform(reads) == [b"a", b"restart", 1]
        assert client.calls == before + 1


def test_a_batch_that_one_transaction_cannot_hold_is_performed_in_order(
    etcd: Cluster, root: str
) -> None:
    with store_on(etcd.client(), root) as store:
        many = [Operation("append", f"k{n}", b"%d" % n) for n in range(40)]
        assert store.perform(batch(*many)) == [None] * 40
        twice = batch(
            Operation("put", "k", b"1"),
            Operation("append", "k", b"2"),
            Operation("read", "k"),
            Operation("compare_set", "k", b"3", expected=b"12"),
            Operation("compare_set", "k", b"4", expected=b"12"),
            Operation("keys", "k3"),
            Operation("delete_prefix", "k3"),
            Operation("keys", "k3"),
            Operation("delete", "k"),
            Operation("compare_set", "k", b"5"),
        )
        names = tuple(sorted(f"k{n}" for n in (3, *range(30, 40))))
        found = [None, None, b"12", b"3", b"3", Keys(names), None, Keys(()), 1, b"5"]
        assert store.perform(twice) == found
        large = [Operation("put", f"large{n}", b"x" * 700_000) for n in range(3)]
        assert store.perform(batch(*large)) == [None] * 3


def test_one_part_of_a_batch_that_fails_leaves_the_others(etcd: Cluster, root: str) -> None:
    with store_on(etcd.client(), root) as store:
        store.put("text", b"text")
        store.put("empty", b"")
        parts = batch(
            Operation("add", "text", amount=1),
            Operation("append", "log", b"a"),
            Operation("compare_set", "empty", b"v"),
        )
        failed, *others = store.perform(parts)  # type: ignore[misc]
        assert isinstance(failed, Failed)
        assert "no number" in failed.reason
        assert others == [None, b"v"]
        assert (store.read("text"), store.read("empty")) == (b"text", b"v")


def test_what_is_no_number_is_not_added_to(etcd: Cluster, root: str) -> None:
    with store_on(etcd.client(), root) as store:
        store.put("k", b"text")
        for amount in (1, 5):
            with pytest.raises(StoreError, match=r"add: the value under '.*k' is no number: b'te"):
                store.add("k", amount)
        assert store.read("k") == b"text"
        store.append("k", b"!")
        with pytest.raises(StoreError, match="no number"):
            store.add("k", 1)
        assert store.read("k") == b"text!"


def test_prefixes_and_keys_that_begin_alike(etcd: Cluster, root: str) -> None:
    with store_on(etcd.client(), root) as store:

        def keys(prefix: str) -> tuple[str, ...]:
            found = store.perform(Operation("keys", prefix))
            assert isinstance(found, Keys)
            return found.names

        for key in ("a", "a/b", "ab", "b"):
            store.append(key, key.encode())
        assert keys("") == ("a", "a/b", "ab", "b")
        assert keys("a") == ("a", "a/b", "ab")
        store.delete("a")
        assert keys("a") == ("a/b", "ab")
        store.delete_prefix("a")
        assert keys("") == ("b",)
        assert [store.perform(Operation("check", key)) for key in "ba"] == [1, 0]
        with pytest.raises(ValueError, match="NUL"):
            store.put("a\0b", b"")


def leased(client: EtcdClient, root: str) -> Fence:
    """A host's key under a lease that is long enough for the test."""
    lease = int(client.repeat("/v3/lease/grant", {"TTL": "600"}, NET_S)["ID"])
    fence = Fence(f"{root}h/me".encode(), lease)
    body = layout.transaction([], [layout.put(fence.host_key, b"", lease)], [])
    client.repeat("/v3/kv/txn", body, NET_S)
    return fence


def test_no_write_of_a_host_passes_after_its_lease(etcd: Cluster, root: str) -> None:
    client = etcd.client()
    fence = leased(client, root)
    with store_on(etcd.client(), root, fence=fence) as store, store_on(client, root) as other:
        store.put("k", b"1")
        store.append("log", b"1")
        client.repeat("/v3/lease/revoke", {"ID": str(fence.lease)}, NET_S)
        writes = {
            "put": (b"2",),
            "append": (b"2",),
            "claim": (b"2",),
            "add": (1,),
            "delete": (),
            "delete_prefix": (),
        }
        for name, arguments in writes.items():
            with pytest.raises(LeaseOver, match="lease of this host in etcd has expired"):
                getattr(store, name)("k", *arguments)
        with pytest.raises(LeaseOver):
            store.perform(Operation("compare_set", "k", b"2", expected=b"1"))
        assert (other.read("k"), other.read("log")) == (b"1", b"1")


def test_a_write_that_was_sent_before_the_lease_ended_does_not_pass_after_it(
    etcd: Cluster, root: str
) -> None:
    class Holding(EtcdClient):
        held: Any = None

        def call(self, path: str, body: Any, limit: float | None = None) -> Any:
            if path == "/v3/kv/txn" and self.held is None:
                self.held = body
                sent.set()
                assert released.wait(NET_S)
            return super().call(path, body, limit)

    sent, released = threading.Event(), threading.Event()
    client = etcd.client()
    fence = leased(client, root)
    holding = Holding(etcd.endpoints, Security())
    with (
        store_on(client, root) as other,
        store_on(holding, root, fence=fence) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        writing = pool.submit(store.put, "k", b"stale")
        assert sent.wait(NET_S)
        client.repeat("/v3/lease/revoke", {"ID": str(fence.lease)}, NET_S)
        other.put("k", b"new")
        released.set()
        with pytest.raises(LeaseOver):
            writing.result(NET_S)
        assert other.read("k") == b"new"
