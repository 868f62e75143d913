"""The store of one iteration: new every time, reachable for others, ended by `close`."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from outlast.errors import InternalError
from outlast.inprocess.store import IterationStore
from outlast.system.sockets import address_towards


@pytest.fixture
def store() -> Iterator[IterationStore]:
    made = IterationStore("127.0.0.1")
    yield made
    made.close()


def test_others_reach_what_one_serves(store: IterationStore) -> None:
    other = IterationStore("127.0.0.1")
    other.where = store.serve()
    assert store.endpoint == other.endpoint
    store.connect().set("key", "value")
    assert other.connect().get("key") == b"value"


def test_each_iteration_has_a_fresh_one(store: IterationStore) -> None:
    store.serve()
    store.connect().set("key", "value")
    store.serve()
    assert not store.connect().check(["key"])


def test_it_is_gone_when_it_is_closed(store: IterationStore) -> None:
    store.serve()
    host, port = store.endpoint
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port)).close()
    with pytest.raises(InternalError, match="no store yet"):
        store.connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_job_on_loopback_stays_there(host: str) -> None:
    assert address_towards((host, 29500)) in ("127.0.0.1", "::1")


def test_an_address_of_this_host_is_its_own() -> None:
    own = address_towards(None)
    assert address_towards((own, 29500)) == own
