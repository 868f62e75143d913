"""Preemption: in any interleaving, all ranks stop after the same step, or none does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.stop_agreement import StopAgreement
from outlast.errors import CheckpointError, StoreError

NET_S = 60.0


class Turns:
    """Threads wait here before each operation; a seeded generator lets one continue at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._next: str | None = None
        self._over = False
        self._thread = threading.Thread(target=self._deal)
        self._thread.start()

    def take(self, name: str) -> None:
        with self._changed:
            if self._over:
                return
            self._waiting.append(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._next == name or self._over, NET_S)
            self._next = None
            self._changed.notify_all()

    def end(self) -> None:
        """Lets all threads continue from now on."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _deal(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._waiting and self._next is None) or self._over, NET_S
                )
                if self._over:
                    return
            time.sleep(0.0002)  # lets threads that are about to arrive be chosen too
            with self._changed:
                chosen = self._random.choice(sorted(self._waiting))
                self._waiting.remove(chosen)
                self._next = chosen
                self._changed.notify_all()


class Stepped:
    """A connection to a store whose operations each wait for a turn."""

    def __init__(self, store: MemoryStore, turns: Turns, name: str) -> None:
        self._store = store
        self._turns = turns
        self._name = name

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        work = getattr(self._store, operation)

        def turn(*args: Any) -> Any:
            if operation == "wait_for":  # only the return from the wait takes a turn
                work(*args)
            self._turns.take(f"{self._name} {threading.current_thread().name}")
            return work(*args)

        return turn


class Training:
    """Ranks in threads; each step is a collective of all ranks."""

    def __init__(self, ranks: int, steps: int, requests: list[tuple[int, int]], seed: int) -> None:
        self.ranks, self.steps, self.requests = ranks, steps, requests
        self.turns = Turns(seed)
        self.store = MemoryStore()
        self.collective = threading.Barrier(ranks)
        self.ended: dict[int, tuple[int, bool]] = {}
        self.errors: list[BaseException] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._rank, args=(r,)) for r in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NET_S)
        self.turns.end()
        assert not any(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join()

    def _rank(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as e:  # noqa: BLE001 - for the test
            self.errors.append(e)
            self.collective.abort()

    def _train(self, rank: int) -> None:
        store = Stepped(self.store, self.turns, f"rank {rank}")
        agreement = StopAgreement(CallLedger(store, "stop", rank, self.ranks), 1)
        try:
            if (rank, 0) in self.requests:
                agreement.request("before the first step")
            step, stopped = 0, False
            while step < self.steps and not stopped:
                self.turns.take(f"rank {rank} trains")
                self.collective.wait(NET_S)
                step += 1
                if (rank, step) in self.requests:
                    agreement.request(f"in step {step}")
                stopped = agreement.is_last(step, NET_S)
            self.ended[rank] = step, stopped
        finally:
            agreement.close()


@given(data=st.data())
def test_all_stop_after_the_same_step(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    steps = data.draw(st.integers(1, 6) | st.just(25))
    requests = data.draw(
        st.lists(
            st.tuples(st.integers(0, ranks - 1), st.integers(0, min(steps, 8))),
            max_size=3,
            unique=True,
        )
    )
    training = Training(ranks, steps, requests, data.draw(st.integers(0, 2**32)))
    training.run()
    assert training.errors == []
    assert len(training.ended) == ranks
    assert len(set(training.ended.values())) == 1
    step, stopped = training.ended[0]
    if not requests:
        assert (step, stopped) == (steps, False)
    if requests and not stopped:
        assert step == steps, "the request came too late"


def test_a_long_training_is_stopped_in_time() -> None:
    """Whichever rank receives the request."""
    for rank in range(3):
        training = Training(3, 10_000, [(rank, 2)], seed=rank)
        training.run()
        assert training.errors == []
        (end,) = set(training.ended.values())
        assert end[1]
        assert 2 <= end[0] < 10_000


# -- chosen interleavings ------------------------------------------------------------------------


class Fragile(MemoryStore):
    """A store that can be lost; pending waits then fail."""

    lost = False

    def lose(self) -> None:
        with self._changed:
            self.lost = True
            self.table = _Lost()
            self._changed.notify_all()


class _Lost(dict[str, bytes]):
    def _raise(self, *args: Any) -> Any:
        raise StoreError("the store is gone")

    __contains__ = __getitem__ = __setitem__ = get = setdefault = pop = _raise  # type: ignore[assignment]


def agreements(store: MemoryStore, ranks: int, begun: int = 1) -> list[StopAgreement]:
    return [StopAgreement(CallLedger(store, "stop", rank, ranks), begun) for rank in range(ranks)]


def await_decision(agreement: StopAgreement) -> None:
    """Waits until the decision has arrived."""
    with agreement._changed:
        agreement._changed.wait_for(lambda: agreement._last_step is not None, NET_S)
    assert agreement._last_step is not None


def test_all_stop_after_the_last_step_that_any_rank_has_begun() -> None:
    first, second = both = agreements(MemoryStore(), 2)
    assert not first.is_last(1, NET_S), "has begun the second step"
    second.request("the machine is wanted back")
    await_decision(first)
    await_decision(second)
    assert not second.is_last(1, NET_S)
    assert first.is_last(2, NET_S)
    assert second.is_last(2, NET_S)
    for each in both:
        assert each.reason.startswith("rank 1 on ")
        assert each.reason.endswith(": the machine is wanted back")
        each.close()


def test_a_request_before_the_first_step() -> None:
    (alone,) = agreements(MemoryStore(), 1)
    alone.request("at once")
    await_decision(alone)
    assert alone.is_last(1, NET_S)
    alone.close()


def test_repeated_requests() -> None:
    first, second = agreements(MemoryStore(), 2, begun=8)
    for each in (first, second, first):
        each.request("now")
    await_decision(first)
    await_decision(second)
    assert first.is_last(8, NET_S)
    assert second.is_last(8, NET_S)
    second.close()
    first.close()


def test_a_rank_that_never_answers_is_an_error_after_the_timeout() -> None:
    store = MemoryStore()
    alone = StopAgreement(CallLedger(store, "stop", 0, 2), 1)
    alone.request("now")
    while store.read("stop/begun0/part/0") is None:
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match=r"told to stop \(rank 0 on .*now\), but not all"):
        alone.is_last(1, 0.01)
    alone.close()


@pytest.mark.parametrize("closed", [0, 1])
def test_no_rank_stops_if_the_training_of_one_is_over(closed: int) -> None:
    both = agreements(MemoryStore(), 2)
    both[closed].close()
    other = both[1 - closed]
    other.request("too late")
    await_decision(other)
    assert not other.is_last(1, NET_S)
    other.close()


def test_closing_in_any_order_with_a_request_on_its_way() -> None:
    for first in (0, 1, 2):
        three = agreements(MemoryStore(), 3)
        three[1].request("now")
        for i in range(3):
            three[(first + i) % 3].close()


def test_a_lost_store_is_an_error_only_after_a_request() -> None:
    store = Fragile()
    both = agreements(store, 2)
    store.lose()
    assert not both[0].is_last(1, NET_S)
    both[0].request("now")
    with pytest.raises(CheckpointError, match=r"told to stop .*now.* the store is gone"):
        for step in range(2, 1_000_000):
            assert not both[0].is_last(step, NET_S)
    for each in both:
        each.close()


def test_a_store_lost_before_the_decision() -> None:
    store = Fragile()
    alone = StopAgreement(CallLedger(store, "stop", 1, 2), 1)
    alone.request("now")
    while store.read("stop/begun0/part/1") is None:
        time.sleep(0.001)
    store.lose()
    with pytest.raises(CheckpointError, match="the store is gone"):
        alone.is_last(1, NET_S)
    alone.close()
