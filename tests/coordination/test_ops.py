"""`drive` and the links: coroutines whose operations are performed on a store."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from outlast.coordination.ops import Link, Op, drive, perform_on, run
from outlast.coordination.stores.store import KeyTimeout, MemoryStore
from outlast.errors import InternalError


def test_operations_are_performed_in_order_and_their_results_come_back() -> None:
    store = MemoryStore()

    async def work(link: Link) -> list[object]:
        await link.put("a", b"1")
        await link.append("a", b"2")
        got = [await link.read("a"), await link.claim("a", b"x"), await link.claim("b", b"y")]
        await link.delete("a")
        return [*got, await link.read("a"), await link.add("n", 3), await link.wait_for("b", None)]

    assert drive(work(Link("p/")), perform_on(store)) == [b"12", b"12", b"y", None, 3, b"y"]
    assert set(store.table) == {"p/b", "p/n"}
    performing = Link(perform=perform_on(MemoryStore())).at("p/")
    assert run(work(performing)) == [b"12", b"12", b"y", None, 3, b"y"]


def test_a_link_without_a_store_runs_only_under_a_driver() -> None:
    async def work(link: Link) -> None:
        await link.put("k", b"1")

    with pytest.raises(InternalError, match="put of 'k'"):
        run(work(Link()))


def test_what_an_operation_raises_is_raised_at_its_await() -> None:
    async def work(link: Link) -> str:
        try:
            await link.wait_for("never", 0.0)
        except KeyTimeout:
            await link.put("caught", b"1")
            return "caught"
        return "missed"

    store = MemoryStore()
    assert drive(work(Link()), perform_on(store)) == "caught"
    assert store.read("caught") == b"1"


@pytest.mark.parametrize("error", [KeyTimeout("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_coroutine_does_not_catch_goes_up(error: BaseException) -> None:
    left = []

    async def work(link: Link) -> None:
        try:
            await link.read("k")
        finally:
            left.append(1)

    def perform(op: Op) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        drive(work(Link()), perform)
    assert caught.value is error
    assert left == [1]


def test_no_cycle_is_left_when_an_error_was_passed() -> None:
    class Held:
        pass

    async def work(link: Link) -> None:
        held = Held()
        refs.append(weakref.ref(held))
        await link.wait_for("never", 0.0)

    refs: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with contextlib.suppress(KeyTimeout):
            drive(work(Link()), perform_on(MemoryStore()))
        assert refs[0]() is None
    finally:
        gc.enable()
