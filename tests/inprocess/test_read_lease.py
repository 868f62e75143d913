"""What a rank knows of a restart without asking the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.coordination.membership import RESTART, MembershipProtocol
from outlast.coordination.ops import Link, perform_on, run
from outlast.coordination.stores.store import MemoryStore
from outlast.inprocess.environment import Launch, read_launch
from outlast.inprocess.read_lease import ReadLease
from outlast.inprocess.recovery.rank_host import RankHost
from outlast.system.lease_page import HostPage, LeasePage, now

ASKS = "read-lease/h1"


class Store(MemoryStore):
    """Counts the questions whether an iteration is over."""

    asked = 0

    def read(self, key: str) -> bytes | None:
        self.asked += key.startswith("over/")
        return super().read(key)


class Rank:
    """A rank, and how often it has asked the store."""

    def __init__(self, launch: Launch, store: Store | None = None) -> None:
        self.store = store or Store()
        self.membership = MembershipProtocol(Link(perform=perform_on(self.store)), 2)
        self.lease = ReadLease(launch)
        self.lease.begin(self.membership)

    def has_begun(self, iteration: int = 0) -> bool:
        return self.lease.has_begun(self.membership, iteration)

    @property
    def asked(self) -> int:
        return self.store.asked


def launched(**given: str) -> Launch:
    return dataclasses.replace(read_launch(), **given)


@pytest.fixture
def host_page() -> Iterator[HostPage]:
    page = HostPage()
    yield page
    page.close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LeasePage]:
    page = LeasePage.create(tmp_path)
    yield page
    page.close()


def test_on_one_host_the_store_is_asked_once_for_each_iteration(host_page: HostPage) -> None:
    rank = Rank(launched(read_lease=str(host_page.path)))
    assert [rank.has_begun() for _ in range(5)] == [False] * 5
    assert rank.asked == 1
    assert [rank.has_begun(1) for _ in range(5)] == [False] * 5
    assert rank.asked == 2
    assert not rank.store.ops["put"]


def test_on_one_host_an_abort_of_any_rank_is_known_before_it(host_page: HostPage) -> None:
    launch = launched(read_lease=str(host_page.path))
    rank, peer = Rank(launch), ReadLease(launch)
    assert not rank.has_begun()
    run(rank.membership.end(0, RESTART))
    assert not rank.has_begun()  # nobody has begun an abort
    peer.recall()
    assert rank.has_begun()
    assert rank.has_begun()
    peer.close()


@pytest.mark.parametrize("with_a_page", [False, True])
def test_a_rank_whose_abort_the_page_would_not_tell_has_all_ask_the_store(
    with_a_page: bool, host_page: HostPage, tmp_path: Path
) -> None:
    """It has no page, as when it may open no more files, or that of another host, as when each of
    two workers of `outlast run` starts ranks of one job on its host.
    """
    other = HostPage()
    pages = [str(host_page.path), str(other.path if with_a_page else tmp_path / "gone")]
    size = 2 if with_a_page else 1
    first = Rank(launched(read_lease=pages[0], world_size=size))
    second = Rank(launched(read_lease=pages[1], world_size=size), first.store)
    assert not first.has_begun()
    run(second.membership.end(0, RESTART))
    second.lease.recall()
    assert first.has_begun()
    first.lease.close()
    second.lease.close()
    other.close()


def test_a_file_that_is_not_the_page_is_not_written_to(tmp_path: Path) -> None:
    """The launcher has ended, or is on another host, and its number is that of another process."""
    with (tmp_path / "weights").open("wb+") as file:
        file.write(bytes(64))
        file.flush()
        rank = Rank(launched(read_lease=f"/proc/self/fd/{file.fileno()}"))
        rank.lease.recall()
    assert (tmp_path / "weights").read_bytes() == bytes(64)


def test_an_abort_in_another_call_costs_one_question(host_page: HostPage) -> None:
    launch = launched(read_lease=str(host_page.path))
    rank, peer = Rank(launch), ReadLease(launch)
    rank.has_begun()
    peer.recall()
    assert [rank.has_begun() for _ in range(3)] == [False] * 3
    assert rank.asked == 2
    peer.close()


def test_without_a_page_the_store_is_asked_each_time() -> None:
    rank = Rank(launched(read_lease=""))
    assert [rank.has_begun() for _ in range(3)] == [False] * 3
    rank.lease.recall()
    assert rank.asked == 3


def test_a_page_that_is_gone_is_said_and_the_store_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(launched(read_lease=str(tmp_path / "gone")))
    assert f"page {tmp_path / 'gone'} cannot be used" in caplog.text
    assert [rank.has_begun() for _ in range(3)] == [False] * 3
    assert rank.asked == 3


def test_on_many_hosts_a_host_asks_for_its_read_lease_once(page: LeasePage) -> None:
    rank = Rank(launched(read_lease=str(page.path), host_id="h1"))
    assert not rank.has_begun()
    assert rank.store.table == {ASKS: b"1"}
    assert not rank.has_begun()
    assert rank.asked == 2  # as long as there is none
    page.renew_reads(7, now() + 60)
    assert [rank.has_begun() for _ in range(5)] == [False] * 5
    assert rank.asked == 3
    assert rank.store.ops["put"] == 1


def test_a_read_lease_that_counts_another_key_or_is_over_vouches_for_nothing(
    page: LeasePage,
) -> None:
    rank = Rank(launched(read_lease=str(page.path), host_id="h1"))
    page.renew_reads(7, now() + 60)
    assert not rank.has_begun()
    run(rank.membership.end(0, RESTART))
    page.renew_reads(8, now() + 60)
    assert rank.has_begun()
    page.renew_reads(7, now() - 1)
    assert rank.has_begun()


def test_on_many_hosts_a_rank_does_not_write_to_the_page(page: LeasePage) -> None:
    rank = Rank(launched(read_lease=str(page.path), host_id="h1"))
    page.renew_reads(7, now() + 60)
    rank.lease.recall()
    assert page.covered == 7


def test_a_lease_that_is_renewed_while_a_rank_looks(page: LeasePage) -> None:
    """The old one is over, so others may have been told; the new one counts what they were told."""

    class Renewed:
        """Fields of a page that is renewed after the first look at any of them."""

        def __init__(self, fields: memoryview) -> None:
            self.fields = fields

        def __getitem__(self, at: int) -> float:
            found: float = self.fields[at]
            page.renew_reads(8, now() + 60)
            return found

        def release(self) -> None:
            self.fields.release()

    reader = LeasePage.open(page.path)
    page.renew_reads(7, now() - 1)
    reader._deadlines = Renewed(reader._deadlines)  # type: ignore[assignment]
    reader._covered = Renewed(reader._covered)  # type: ignore[assignment]
    assert not reader.unchanged(7)
    reader.close()


@pytest.mark.parametrize("again", [False, True])
def test_other_ranks_know_of_an_abort_before_it(again: bool) -> None:
    """Also of a repeated one: the first may not have come to the communicators, after an error."""
    order: list[str] = []

    def part(_: Any) -> None:
        order.append("abort")

    part.again = part  # type: ignore[attr-defined]
    nothing = SimpleNamespace(begin=lambda: None, hold=lambda: None, end_wait=lambda: None)
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(abort_parts=[part]),
        running=SimpleNamespace(
            read_lease=SimpleNamespace(recall=lambda: order.append("recall")),
            state=SimpleNamespace(copy=lambda: None),
        ),
        stores=nothing,
        torch_log=nothing,
        releaser=nothing,
    )
    RankHost.run_abort(host, again)
    assert order == ["recall", "abort"]
