"""The barrier, in every order of arrivals and losses."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from outlast.coordination.barrier import (
    LEDGER,
    arrive,
    columns,
    complete,
    done_key,
    missing,
    summary,
)
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.coordination.records import LostRecord, to_line
from outlast.coordination.stores.store import MemoryStore

Make = Callable[[Link], Coroutine[Any, Any, Any]]


async def come(link: Link, member: int, expected: frozenset[int]) -> None:
    await arrive(link, "b", member, expected, rank=member)


async def lose(link: Link, member: int, expected: frozenset[int]) -> None:
    await link.append(LEDGER, to_line(LostRecord(member, "gone")))
    await complete(link, "b", expected)


class Run:
    """Coroutines on one store, stepped by the test."""

    def __init__(self, makers: list[Make]) -> None:
        self.store = MemoryStore()
        self.perform = perform_on(self.store)
        self.coroutines = [make(Link()) for make in makers]
        self.asked: list[Op | None] = [c.send(None) for c in self.coroutines]

    def step(self, number: int) -> None:
        op = self.asked[number]
        assert op is not None
        try:
            self.asked[number] = self.coroutines[number].send(self.perform(op))
        except StopIteration:
            self.asked[number] = None

    def kill(self, number: int) -> None:
        self.coroutines[number].close()
        self.asked[number] = None

    @property
    def open(self) -> list[int]:
        return [number for number, op in enumerate(self.asked) if op is not None]

    @property
    def done(self) -> bool:
        return done_key("b") in self.store.table

    def close(self) -> None:
        for coroutine in self.coroutines:
            coroutine.close()


def every_order(
    makers: list[Make], begin: Callable[[Run], None] = lambda run: None
) -> Iterator[tuple[list[int], Run]]:
    """Every interleaving of the operations, run to the end: depth first, each replayed in full.

    `begin` runs before.
    """
    pending: list[list[int]] = [[]]
    while pending:
        path = pending.pop()
        run = Run(makers)
        begin(run)
        for number in path:
            run.step(number)
        while run.open:
            first, *others = run.open
            pending.extend([*path, other] for other in others)
            path = [*path, first]
            run.step(first)
        yield path, run


def test_two_that_come_in_every_order() -> None:
    expected = frozenset({0, 1})
    makers: list[Make] = [lambda link, m=m: come(link, m, expected) for m in expected]  # type: ignore[misc]
    orders = 0
    for path, run in every_order(makers):
        assert run.done, path
        orders += 1
    assert orders > 20


@pytest.mark.parametrize("absent", [0, 1])
def test_one_that_comes_and_one_that_is_lost_in_every_order(absent: int) -> None:
    expected = frozenset({0, 1})
    makers: list[Make] = [
        lambda link: come(link, 1 - absent, expected),
        lambda link: lose(link, absent, expected),
    ]
    for path, run in every_order(makers):
        assert run.done, path


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_that_come_and_one_that_is_lost_in_every_order() -> None:
    expected = frozenset({0, 1, 2})
    makers: list[Make] = [
        lambda link: come(link, 0, expected),
        lambda link: come(link, 1, expected),
        lambda link: lose(link, 2, expected),
    ]
    orders = 0
    for path, run in every_order(makers):
        assert run.done, path
        orders += 1
    assert orders > 5_000


@pytest.mark.slow
def test_one_that_dies_at_any_point_of_its_arrival_and_is_recorded_then() -> None:
    expected = frozenset({0, 1})
    makers: list[Make] = [
        lambda link: come(link, 0, expected),
        lambda link: come(link, 1, expected),
        lambda link: lose(link, 1, expected),
    ]

    def one_dies(run: Run, before: int, lived: int) -> None:
        for number in [0] * before + [1] * lived:
            if run.asked[number] is not None:
                run.step(number)
        run.kill(1)

    for lived in range(6):
        # Every order of 0 and the recorder after `lived` operations of 1, and the orders before.
        for before in range(6):
            begin = functools.partial(one_dies, before=before, lived=lived)
            for path, run in every_order(makers, begin):
                assert run.done, (lived, before, path)


def test_it_is_not_done_before_all_are_accounted_for() -> None:
    expected = frozenset({0, 1, 2})
    makers: list[Make] = [
        lambda link: come(link, 0, expected),
        lambda link: lose(link, 2, expected),
    ]
    for path, run in every_order(makers):
        assert not run.done, path


def test_who_is_missing_and_what_was_said() -> None:
    store = MemoryStore()
    link, expected = Link(), frozenset({3, 5, 7})
    run = perform_on(store)
    drive(come(link, 3, expected), run)
    assert drive(missing(link, "b", expected), run) == {5, 7}
    drive(lose(link, 7, expected), run)
    assert drive(missing(link, "b", expected), run) == {5}
    assert drive(complete(link, "b", expected), run) is None
    drive(come(link, 5, expected), run)
    assert drive(missing(link, "b", expected), run) == frozenset()
    assert summary(drive(complete(link, "b", expected), run)) == {
        3: {"member": 3, "rank": 3},
        5: {"member": 5, "rank": 5},
    }


def test_all_that_pass_read_the_same_and_not_the_log() -> None:
    store = MemoryStore()
    link, expected = Link(), frozenset({0, 1, 2})
    run = perform_on(store)
    for member in (0, 2):
        drive(arrive(link, "b", member, expected, most={"step": 5 + member}, rank=member), run)
    drive(lose(link, 1, expected), run)
    done = store.read(done_key("b"))
    assert done is not None
    late = arrive(link, "b", 1, expected, most={"step": 90}, rank=1)  # it was mistaken for lost
    assert drive(late, run) == store.read(done_key("b")) == done
    assert summary(done) == {
        0: {"member": 0, "rank": 0, "step": 7},
        2: {"member": 2, "rank": 2, "step": 7},
    }
    assert columns(done) == {"member": [0, 2], "rank": [0, 2], "step": [7, 7]}


@pytest.mark.parametrize("size", [100, 10_000])
def test_what_all_members_read_does_not_grow_with_their_number(size: int) -> None:
    store, expected = MemoryStore(), frozenset(range(size))
    lines = [b'{"member":%d,"rank":%d,"world_size":%d}\n' % (m, m, size) for m in range(size)]
    store.put("b/arrived", b"".join(lines))
    done = drive(complete(Link(), "b", expected), perform_on(store))
    assert done is not None
    assert len(done) < 100


def test_nobody_is_waited_for_in_an_empty_view() -> None:
    store = MemoryStore()
    assert drive(complete(Link(), "b", frozenset()), perform_on(store)) is not None


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_the_operations_of_a_member_do_not_grow_with_the_size(size: int) -> None:
    store, expected = MemoryStore(), frozenset(range(size))
    worst = 0
    for member in range(size):
        before = Counter(store.ops)
        drive(come(Link(), member, expected), perform_on(store))
        worst = max(worst, (store.ops - before).total())
    assert worst == 7  # of the last: append, add, read; three reads at once; claim
    assert store.ops.total() == 3 * size + 4
