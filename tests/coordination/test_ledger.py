"""Rounds of ranks: every interleaving of reports gives one verdict, and no key is left over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from outlast.coordination.call_ledger import CallFailure, CallLedger, Round, Verdict, connect_ledger
from outlast.coordination.stores.store import KeyTimeout, MemoryStore, Store
from outlast.coordination.stores.torch_store import TorchStore
from outlast.errors import AsyncCallError


class Died(Exception):
    pass


class Mortal:
    """A rank's connection that is lost after some operations."""

    def __init__(self, store: MemoryStore, steps: int) -> None:
        self._store = store
        self._steps = steps

    def __getattr__(self, name: str) -> object:
        if self._steps == 0:
            raise Died
        self._steps -= 1
        return getattr(self._store, name)


def rounds(world_size: int, store: Store | None = None) -> tuple[MemoryStore, list[Round]]:
    """A round, as each rank has it."""
    table = MemoryStore()
    used = table if store is None else store
    ledgers = [CallLedger(used, "p", rank, world_size) for rank in range(world_size)]
    return table, [each.next() for each in ledgers]


def failure(rank: int, call: int = 0) -> CallFailure:
    return CallFailure(call, "save", rank, f"host{rank}", f"ValueError: {rank}", "Traceback ...")


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[tuple[int, str]]]:
    """Some ranks finish, some fail, some are dropped after they finished; in any order."""
    world_size = draw(st.integers(1, 5) | st.integers(16, 18))
    said: list[list[tuple[int, str]]] = []
    for rank in range(world_size):
        kinds = [["finish"], ["fail"], ["finish", "fail"]]
        said.append([(rank, what) for what in draw(st.sampled_from(kinds))])
    order = draw(st.permutations([rank for rank in range(world_size) for _ in said[rank]]))
    return world_size, [said[rank].pop(0) for rank in order]


@given(stories())
def test_whatever_is_said_in_whatever_order_there_is_one_verdict(
    story: tuple[int, list[tuple[int, str]]],
) -> None:
    world_size, order = story
    table, ranks = rounds(world_size)
    first: Verdict | None = None
    finished: set[int] = set()
    for rank, what in order:
        if what == "finish":
            ranks[rank].finish()
            finished.add(rank)
        else:
            won = ranks[rank].fail(failure(rank))
            assert won == (first is None)
        seen = {each.verdict() for each in ranks}
        assert len(seen) == 1
        (verdict,) = seen
        if first is not None:
            assert verdict == first, "a verdict that was seen never changes"
        elif verdict is not None:
            first = verdict
            assert verdict.done == (len(finished) == world_size)
            if not verdict.done:
                assert verdict.failure == failure(rank)
    assert first is not None, "there is a verdict when everyone has said something"
    for each in ranks:
        assert table.table
        each.forget()
    assert table.table == {}


@given(st.permutations(range(3)), st.integers(0, 3))
def test_a_death_between_two_steps_never_makes_a_call_done(order: list[int], steps: int) -> None:
    """A rank that dies while reporting its finish leaves the call open, or done by all."""

    table, ranks = rounds(3)
    mortal = Mortal(table, steps)
    ranks[2] = CallLedger(mortal, "p", 2, 3).next()  # type: ignore[arg-type]
    died = False
    for rank in order:
        try:
            ranks[rank].finish(b"part")
        except Died:
            died = True
    verdict = ranks[0].verdict()
    assert verdict in (None, Verdict())
    if verdict is None:
        assert died
    else:
        assert ranks[0].parts() == [b"part"] * 3


@given(st.sampled_from([16, 17, 33, 256, 300]), st.randoms(use_true_random=False))
def test_parts_come_along_the_tree_in_the_order_of_the_ranks(world_size: int, order: Any) -> None:
    table, ranks = rounds(world_size)
    parts = [b"" if rank % 7 == 0 else json.dumps([rank, 'a "b"']).encode() for rank in range(300)]
    shuffled = order.sample(ranks, world_size)
    for each in shuffled:
        assert each.verdict() is None
        each.finish(parts[each.rank])
    assert ranks[3].await_verdict(0.0).done
    assert ranks[0].parts() == ranks[0].parts_so_far() == parts[:world_size]
    for each in order.sample(ranks, world_size):
        each.forget()
    assert table.table == {}


def test_a_part_that_is_missing_in_the_tree_leaves_the_call_open() -> None:
    _, ranks = rounds(40)
    for each in ranks[:17] + ranks[18:]:
        each.finish(b"part")
    assert ranks[0].verdict() is None
    assert ranks[0].parts_so_far() == [b"" if rank == 17 else b"part" for rank in range(40)]
    assert ranks[17].fail(failure(17))
    assert ranks[0].await_verdict(0.0) == Verdict(failure(17))


def test_a_number_of_operations_that_does_not_depend_on_the_ranks() -> None:
    counts, reads = [], []
    for world_size in (16, 4096):
        table, ranks = rounds(world_size)
        for each in ranks:
            each.announce("save")
            each.finish(b"part")
        before = table.ops["read"]
        ranks[0].parts()
        reads.append(table.ops["read"] - before)
        for each in ranks:
            each.forget()
        counts.append(sum(table.ops.values()) / world_size)
    assert reads == [16, 16], "of the coordinator"
    assert counts[1] < counts[0] + 2, "on average"


def test_parts_and_a_conclusion() -> None:
    _, ranks = rounds(3)
    for each in reversed(ranks):
        each.finish(b"" if each.rank == 1 else json.dumps(each.rank).encode())
    assert ranks[0].parts() == [b"0", b"", b"2"]
    with pytest.raises(KeyTimeout):
        ranks[1].await_conclusion(0.0)
    ranks[0].conclude(b"committed")
    assert [each.await_conclusion(None) for each in ranks] == [b"committed"] * 3


def test_a_part_is_text() -> None:
    table, (alone,) = rounds(1)
    with pytest.raises(ValueError, match="utf-8"):
        alone.finish(b"\xff")
    with pytest.raises(ValueError, match=r"U\+001E"):
        alone.finish(b"a\x1eb")
    for payload, why in ((b"\xff", "utf-8"), (b"", "is empty")):
        with pytest.raises(ValueError, match=why):
            alone.conclude(payload)
    assert table.table == {}


def test_another_name_fails_the_call_for_all() -> None:
    _, ranks = rounds(2)
    ranks[0].announce("save")
    with pytest.raises(AsyncCallError, match="scheduled in different order") as caught:
        ranks[1].announce("export")
    for word in ("'save' on rank 0", "'export' on rank 1"):
        assert word in str(caught.value)
    verdict = ranks[0].verdict()
    assert verdict is not None
    assert verdict.failure is not None
    assert str(verdict.failure.to_error()) == str(caught.value)


def test_a_wait_for_the_verdict() -> None:
    _, ranks = rounds(2)
    with pytest.raises(KeyTimeout):
        ranks[0].await_verdict(0.001)
    assert ranks[0].verdict() is None
    ranks[1].fail(failure(1))
    assert ranks[0].await_verdict(None) == Verdict(failure(1))


def test_a_failure_goes_through_json_and_names_everything() -> None:
    said = CallFailure(3, "save", 1, "node7", "ValueError: \udc80", "Traceback\n  line\n")
    assert CallFailure.decode(said.encode()) == said
    text = str(failure(1, call=3).to_error())
    assert text == (
        "background call 3 (save) failed on rank 1 on host1: ValueError: 1\nTraceback ..."
    )
    for garbage in (b"", b"[]", b"{}", b"nothing", b'{"call": "x"}'):
        with pytest.raises(AsyncCallError, match="not a record of a failed call"):
            CallFailure.decode(garbage)


def torch_store(kind: str, folder: Path) -> dist.Store:
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    if kind == "file":
        return dist.FileStore(str(folder / "store"), -1)  # type: ignore[attr-defined]
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_on_torch_stores(kind: str, tmp_path: Path) -> None:
    store = torch_store(kind, tmp_path)
    table = TorchStore(dist.PrefixStore("group", store), kind)  # type: ignore[attr-defined]
    _, ranks = rounds(2, table)
    for each in ranks:
        each.announce("save")
        each.finish(f"part {each.rank}".encode())
    assert ranks[0].parts() == [b"part 0", b"part 1"]
    ranks[0].conclude(b"committed")
    for each in ranks:
        assert each.await_verdict(10.0).done
        assert not each.fail(failure(each.rank))
        assert each.await_conclusion(10.0) == b"committed"
    for each in ranks:
        each.forget()
    tree = ("count/0/0", "left/0/0", "part/0", "part/1")
    for name in ("name", "verdict", "conclusion", *tree):
        assert table.read(f"p/0/{name}") is None


def test_without_a_group_it_is_in_this_process() -> None:
    alone = connect_ledger("calls").next()
    alone.announce("save")
    alone.finish()
    assert alone.await_verdict(None).done
    other = connect_ledger("calls").next()
    assert other.verdict() is None, "every ledger has keys of its own"
    with pytest.raises(ValueError, match="no process group"):
        connect_ledger("calls", group=object())
