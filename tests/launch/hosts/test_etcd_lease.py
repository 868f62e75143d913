"""The lease of a host in etcd: what ends it, and that nothing revives it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.operations import NOT_FOUND, NoAnswer
from outlast.errors import StoreError
from outlast.launch.hosts.etcd import lease as module
from outlast.launch.hosts.etcd.lease import Lease
from outlast.system.lease_page import LeasePage

NET_S = 60.0


HOST_KEY = b"/outlast/r/g/h/h1"


def header(term: int, member: int = 1) -> dict[str, Any]:
    return {"header": {"member_id": str(member), "raft_term": str(term)}}


class FakeEtcd:
    """Grants a lease, and renews it as `renew` says; `now` is the clock of the host, `leader` who
    answers a linearizable read, `key` whether that finds the key of the host.
    """

    where = "h:2379"

    def __init__(self) -> None:
        self.now = 1000.0
        self.renewals = threading.Semaphore(0)
        self.renew: Callable[[], dict[str, Any]] = lambda: {"result": {"TTL": "2"}}
        self.leader, self.key = header(2), True

    def repeat(self, path: str, body: object, limit: float) -> dict[str, str]:
        assert path == "/v3/lease/grant"
        return {"ID": "7", "TTL": "2"}

    def call(self, path: str, body: object, limit: float) -> dict[str, Any]:
        if path == "/v3/kv/range":
            assert body == layout.range_of(HOST_KEY)
            found = {"key": layout.text(HOST_KEY), "value": ""}
            return {**self.leader, "kvs": [found] * self.key}
        assert path == "/v3/lease/keepalive"
        self.renewals.release()
        renewed = self.renew()
        return {"result": header(2) | renewed["result"]}

    def close(self) -> None:
        return


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    fake = FakeEtcd()
    monkeypatch.setattr(module, "now", lambda: fake.now)
    return fake


@contextlib.contextmanager
def held(etcd: FakeEtcd, folder: Path) -> Iterator[tuple[Lease, LeasePage, threading.Event]]:
    """A lease of 1 s, with its page, and the event of its end."""
    page, ended = LeasePage.create(folder), threading.Event()
    lease = Lease(etcd, 1.0, page, ended.set)  # type: ignore[arg-type]
    lease.key = HOST_KEY
    lease.grant(1.0)
    try:
        yield lease, page, ended
    finally:
        lease.close()
        page.close()


def test_the_deadline_counts_from_when_the_renewal_was_sent(etcd: FakeEtcd, tmp_path: Path) -> None:
    def next_one() -> dict[str, Any]:
        etcd.now, etcd.renew = 1000.2, slowly  # it has been sent; the next one is at this time
        return {"result": {"TTL": "2"}}

    def slowly() -> dict[str, Any]:
        etcd.renew = unanswered
        etcd.now += 0.3
        return {"result": {"TTL": "2"}}

    def unanswered() -> dict[str, Any]:
        raise NoAnswer("lost")

    with held(etcd, tmp_path) as (lease, page, _):
        etcd.now = 1000.1
        while page.deadline != 1001.1:
            assert etcd.renewals.acquire(timeout=NET_S)
        etcd.renew = next_one
        while etcd.renew is not unanswered:
            assert etcd.renewals.acquire(timeout=NET_S)
        for _ in range(2):  # the first has been taken note of
            assert etcd.renewals.acquire(timeout=NET_S)
        assert page.deadline == 1001.2
        assert lease.ok


def test_an_answer_that_comes_after_the_deadline_revives_nothing(
    etcd: FakeEtcd, tmp_path: Path
) -> None:
    def too_late() -> dict[str, Any]:
        etcd.now += 0.6  # the workers have been killed; etcd's own time, 2 s, is not over
        return {"result": {"TTL": "2"}}

    with held(etcd, tmp_path) as (lease, page, ended):
        etcd.now, etcd.renew = 1000.9, too_late
        assert ended.wait(NET_S)
        assert page.deadline == 1001.0
        etcd.now = 1000.0  # not even an earlier time revives it
        assert not lease.ok
        with pytest.raises(StoreError, match="could not be renewed for 1 s at etcd h:2379"):
            lease.check()


@pytest.mark.parametrize("how", ["no answer", "expired", "not found"])
def test_a_lease_that_is_not_renewed_ends(etcd: FakeEtcd, tmp_path: Path, how: str) -> None:
    def renew() -> dict[str, Any]:
        if how == "no answer":
            etcd.now += 0.4
            raise NoAnswer("h:2379: Connection refused")
        if how == "not found":
            raise Refused(NOT_FOUND, "requested lease not found")
        return {"result": {}}

    with held(etcd, tmp_path) as (lease, _, ended):
        etcd.renew = renew
        assert ended.wait(NET_S)
        assert not lease.ok
        expected = "Connection refused" if how == "no answer" else "has expired in etcd"
        assert expected in lease.error


def test_a_leader_that_another_has_replaced_renews_nothing(etcd: FakeEtcd, tmp_path: Path) -> None:
    """Its disk has stalled, and it answers renewals; another answers reads, in a later term."""
    with held(etcd, tmp_path) as (lease, page, ended):
        etcd.now = 1000.2
        while page.deadline != 1001.2:
            assert etcd.renewals.acquire(timeout=NET_S)
        etcd.leader = header(3)
        etcd.renewals = threading.Semaphore(0)
        etcd.now = 1000.6
        for _ in range(5):
            assert etcd.renewals.acquire(timeout=NET_S)
        assert page.deadline == 1001.2
        etcd.now = 1001.3
        assert ended.wait(NET_S)
        assert "could not be renewed" in lease.error


@pytest.mark.parametrize("answered", [header(3, 1), header(2, 2), header(3, 2)])
def test_after_a_change_of_the_member_or_its_term_the_next_renewal_counts(
    etcd: FakeEtcd, tmp_path: Path, answered: dict[str, Any]
) -> None:
    def renew() -> dict[str, Any]:
        etcd.now, etcd.leader = 1000.4, answered
        deadlines.append(page.deadline)
        return {"result": {"TTL": "2", **etcd.leader}}

    with held(etcd, tmp_path) as (_, page, _):
        deadlines: list[float] = []
        etcd.now = 1000.2
        while page.deadline != 1001.2:
            assert etcd.renewals.acquire(timeout=NET_S)
        etcd.renew = renew
        while page.deadline != 1001.4:
            assert etcd.renewals.acquire(timeout=NET_S)
        assert deadlines[:2] == [1001.2, 1001.2]  # the first alone shows nothing


def test_a_host_whose_key_is_gone_may_not_act(etcd: FakeEtcd, tmp_path: Path) -> None:
    with held(etcd, tmp_path) as (lease, _, ended):
        etcd.key = False
        assert ended.wait(NET_S)
        assert "has expired in etcd" in lease.error


def test_an_answer_without_a_term_renews_nothing_and_is_said(
    etcd: FakeEtcd, tmp_path: Path
) -> None:
    """A proxy in front of etcd, for example."""
    with held(etcd, tmp_path) as (lease, page, ended):
        etcd.now, etcd.leader = 1000.2, {}
        for _ in range(3):
            assert etcd.renewals.acquire(timeout=NET_S)
        assert page.deadline == 1001.0
        etcd.now = 1001.1
        assert ended.wait(NET_S)
        assert "an answer without 'header'" in lease.error
