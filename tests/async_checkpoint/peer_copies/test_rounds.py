"""Rounds of copies: all ranks or none, and training never waits."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_checkpoint.peer_copies.keepers import ADDRESS, FAST, TOKEN, Keeper, snapshot_of
from inprocess.mutations import mutate
from outlast.async_checkpoint.peer_copies.arrangement import Arrangement
from outlast.async_checkpoint.peer_copies.rounds import CopyRounds
from outlast.async_checkpoint.snapshot.buffers import BufferPool, NoFreeBuffer, SnapshotBuffer
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import CheckpointError
from outlast.events.emitter import Emitter
from outlast.events.event import Event
from outlast.events.types import CopyCompleted, CopySkipped
from outlast.system.shared_memory import SharedMemory

SIZE = 4 << 20
NET_S = 60.0


@dataclasses.dataclass
class Snapshot:
    description: SnapshotDescription
    values: bytes
    buffer: SnapshotBuffer
    sealed: threading.Event
    error: CheckpointError | None = None
    size_bytes = SIZE

    @property
    def save_id(self) -> str:
        return self.description["save_id"]


class Rank:
    """One rank: its keeper, its rounds, and the events of these."""

    def __init__(self, folder: Path, store: MemoryStore, rank: int) -> None:
        self.rank = rank
        self.keeper = Keeper(folder, str(rank))
        client = self.keeper.client
        client.arrange(ADDRESS, TOKEN, FAST)
        client.port()
        arrangement = Arrangement(["a", "b"], ADDRESS, TOKEN, client)
        self.pool = BufferPool(cast(Any, None))
        self.pool.grow(1, spare=1)
        for buffer in self.pool.buffers:
            buffer.memory = SharedMemory(SIZE)
            buffer.structure = cast(Any, SimpleNamespace(index="{}"))
        self.events: list[Event] = []
        self._changed = threading.Condition()
        ledger = CallLedger(store, "copies", rank, 2)
        self.rounds = CopyRounds(self.pool, ledger, arrangement, 1 - rank, Emitter(self))

    def write(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def save(self, step: int, error: str = "") -> Snapshot:
        """Takes a snapshot into a free buffer, as a save does, and gives the buffer back."""
        buffer = next(buffer for buffer in self.pool.buffers if buffer.usable)
        found = None if not error else CheckpointError(error)
        description = snapshot_of(step, SIZE, self.rank)
        snapshot = Snapshot(description, b"", buffer, threading.Event(), found)
        snapshot.sealed.set()
        self.rounds.submit(step, step, cast(Any, snapshot))
        return snapshot

    def after(self, step: int) -> Event:
        """The event that the round of a step ends with."""

        def found() -> list[Event]:
            kinds = CopyCompleted, CopySkipped
            return [e for e in self.events if isinstance(e, kinds) and e.step == step]

        with self._changed:
            assert self._changed.wait_for(found, NET_S)
            (event,) = found()
            return event

    def close(self) -> None:
        self.rounds.close()
        self.keeper.client.close(5.0)
        self.rounds.join()
        self.pool.close()


@contextmanager
def two_ranks(folder: Path) -> Iterator[list[Rank]]:
    folder.chmod(0o700)
    store = MemoryStore()
    ranks = [Rank(folder, store, rank) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def check_rounds(folder: Path) -> None:
    """A receiver that is stopped: saves go on, are skipped by both ranks, and then copied again."""
    with two_ranks(folder) as ranks:
        for rank in ranks:
            rank.save(1)
        done = [rank.after(1) for rank in ranks]
        assert all(isinstance(event, CopyCompleted) for event in done)
        assert [event.held_by for event in done if isinstance(event, CopyCompleted)] == ["b", "a"]
        os.kill(ranks[1].keeper.pid, signal.SIGSTOP)
        for step in (2, 3, 4):
            for rank in ranks:
                rank.save(step)  # there is always a free buffer
        os.kill(ranks[1].keeper.pid, signal.SIGCONT)
        for rank in ranks:
            assert isinstance(rank.after(2), CopyCompleted)
            for step in (3, 4):
                skipped = rank.after(step)
                assert isinstance(skipped, CopySkipped)
                assert "the copy of step 2 was still being sent" in skipped.cause
        for rank in ranks:
            assert rank.keeper.held() == [(2, 1 - rank.rank)]
            assert not rank.pool.has_reserved
            rank.save(5)
        assert all(isinstance(rank.after(5), CopyCompleted) for rank in ranks)
        assert [rank.keeper.held() for rank in ranks] == [[(5, 1)], [(5, 0)]]


def test_a_slow_receiver_costs_copies_and_no_time(tmp_path: Path) -> None:
    check_rounds(tmp_path)


@pytest.mark.slow
def test_a_buffer_that_is_being_sent_must_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, CopyRounds.submit, "if not refusal:", "if True:")
    with pytest.raises((AssertionError, StopIteration)):
        check_rounds(tmp_path)


@pytest.mark.slow
def test_no_rank_copies_what_one_rank_does_not_have(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (one, two):
        one.save(1)
        two.rounds.refuse(1, 1, "a value cannot be pickled")
        one.save(2)  # comes while the round of step 1 is open, or after it
        two.save(2, error="torn")
        for rank in (one, two):
            skipped = rank.after(1)
            assert isinstance(skipped, CopySkipped)
            assert skipped.cause == "rank 1 on b: a value cannot be pickled"
            assert isinstance(rank.after(2), CopySkipped)
            assert rank.keeper.held() == []
        for rank in (one, two):
            rank.save(3)
        assert isinstance(one.after(3), CopyCompleted)


@pytest.mark.slow
def test_a_keeper_that_dies_is_replaced(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (one, two):
        os.kill(two.keeper.pid, signal.SIGSTOP)
        one.save(1)
        two.save(1)
        for rank in (one, two):  # killed earlier, it would be replaced before the copies begin
            while all(
                each.method != "send_copy" for each in [*rank.keeper.client._pending.values()]
            ):
                time.sleep(0.001)
        os.kill(two.keeper.pid, signal.SIGKILL)
        for rank in (one, two):
            skipped = rank.after(1)
            assert isinstance(skipped, CopySkipped)
            assert "the copy to host" in skipped.cause
        for rank in (one, two):
            rank.save(2)
        assert [isinstance(rank.after(2), CopyCompleted) for rank in (one, two)] == [True, True]
        assert (one.keeper.held(), two.keeper.held()) == ([(2, 1)], [(2, 0)])


def test_the_last_complete_copy_is_kept_until_the_next_is_complete(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (one, two):
        for rank in (one, two):
            rank.save(1)
        assert isinstance(one.after(1), CopyCompleted)
        assert isinstance(two.after(1), CopyCompleted)
        one.save(2)
        two.save(2, error="torn")
        for rank in (one, two):
            assert isinstance(rank.after(2), CopySkipped)
        assert (one.keeper.held(), two.keeper.held()) == ([(1, 1)], [(1, 0)])


def test_a_save_waits_for_no_copy() -> None:
    """A reserved buffer is not taken; one save in progress at a time, as without copies."""
    pool = BufferPool(cast(Any, None))
    pool.grow(1, spare=1)
    structure = cast(Any, None)
    pool._lay_out = lambda *_: None  # type: ignore[method-assign]
    first = pool.take(structure, 0.0)
    with pytest.raises(NoFreeBuffer):
        pool.take(structure, 0.0)
    pool.reserve(first, "a copy")
    pool.give_back(first)
    for _ in range(3):
        other = pool.take(structure, 0.0)
        assert other is not first
        pool.give_back(other)
    pool.unreserve(first, "another copy")
    assert not first.usable
    pool.unreserve(first, "a copy")
    assert first.usable
    other.snapshot = cast(Any, {"save_id": "x", "number": 0})
    first.snapshot = cast(Any, {"save_id": "y", "number": 1})
    pool.overwritten_last = "x"
    assert pool.take(structure, 0.0) is first
