"""Waits on real etcd: a history that is compacted meanwhile, streams that break, a closed store."""

from __future__ import annotations

import contextlib
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from etcd_cluster import NET_S, Cluster
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Json, Security, Stream
from outlast.coordination.stores.etcd.store import EtcdStore
from outlast.errors import StoreError


class Gated(EtcdClient):
    """A client whose watches begin only while `open` is set; `streams` are those it has begun."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.endpoints, Security())
        self.open = threading.Event()
        self.asked = threading.Event()
        self.streams: list[Stream] = []

    def stream(self, path: str, body: Json) -> tuple[int, Stream]:
        self.asked.set()
        assert self.open.wait(NET_S)
        number, stream = super().stream(path, body)
        self.streams.append(stream)
        return number, stream


@contextlib.contextmanager
def a_wait(etcd: Cluster, client: EtcdClient) -> Any:
    """A store that waits for the key `k`, with the result of the wait; another store beside it."""
    root = f"/outlast/{uuid.uuid4().hex}/"
    with (
        contextlib.closing(client),
        contextlib.closing(etcd.client()) as other_client,
        contextlib.closing(EtcdStore(other_client, root, "other")) as other,
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(EtcdStore(client, root, "waiter")) as store,
    ):
        yield store, pool.submit(store.wait_for, "k", None), other, other_client


def test_a_watch_whose_history_was_compacted_begins_again_with_a_read(etcd: Cluster) -> None:
    client = Gated(etcd)
    with a_wait(etcd, client) as (store, waiting, other, other_client):
        assert client.asked.wait(NET_S)  # it has read, and is about to watch
        other.put("k", b"v")
        for n in range(3):
            other.put("later", b"%d" % n)
        answer = other_client.repeat("/v3/kv/range", {"key": "AA=="}, NET_S)
        compaction = {"revision": answer["header"]["revision"], "physical": True}
        other_client.repeat("/v3/kv/compaction", compaction, NET_S)
        client.open.set()
        assert waiting.result(NET_S) == b"v"
        while store.waits.restarts < 1:  # the watch was told that its revision is gone
            pass


def test_what_happens_while_a_watch_is_broken_is_not_missed(etcd: Cluster) -> None:
    client = Gated(etcd)
    client.open.set()
    with a_wait(etcd, client) as (_, waiting, other, _client):
        assert client.asked.wait(NET_S)
        while not client.streams:
            pass
        client.open.clear()
        client.asked.clear()
        client.streams[0].shut_down()
        assert client.asked.wait(NET_S)  # it is about to begin again
        other.put("k", b"v")
        assert not waiting.done()
        client.open.set()
        assert waiting.result(NET_S) == b"v"


def test_a_store_that_is_closed_ends_its_waits(etcd: Cluster) -> None:
    client = Gated(etcd)
    client.open.set()
    with a_wait(etcd, client) as (store, waiting, _, _client):
        assert client.asked.wait(NET_S)
        store.close()
        with pytest.raises(StoreError, match="closed"):
            waiting.result(NET_S)


def test_a_wait_that_begins_behind_the_watch_sees_what_came_before(etcd: Cluster) -> None:
    with (
        contextlib.closing(etcd.client()) as client,
        contextlib.closing(EtcdStore(client, f"/outlast/{uuid.uuid4().hex}/", "s")) as store,
    ):
        _, revision = store.look("k")
        store.put("k", b"v")
        start = store.base_of("k")
        end = start + b"\0"
        with ThreadPoolExecutor(1) as pool:  # the watch begins, and sees the write
            pool.submit(store.waits.wait, start, end, revision, NET_S).result(NET_S)
        assert store.waits.wait(start, end, revision, NET_S)
        other = store.base_of("other")
        assert not store.waits.wait(other, other + b"\0", revision, 0.05)
