"""Told to stop: whatever the interleaving, all ranks stop after the same step, or none does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.coordination import MemoryStore
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.preemption import Signals, StopAgreement
from outlast.errors import CheckpointError, StoreError

NET_S = 60.0


class Turns:
    """Threads come here before each operation; one goes on at a time, as a seed has it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._next: str | None = None
        self._over = False
        self._thread = threading.Thread(target=self._deal)
        self._thread.start()

    def take(self, who: str) -> None:
        with self._changed:
            if self._over:
                return
            self._waiting.append(who)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._next == who or self._over, NET_S)
            self._next = None
            self._changed.notify_all()

    def end(self) -> None:
        """From now on everyone goes on."""
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
            time.sleep(0.0002)  # whoever is about to come is one to choose from
            with self._changed:
                chosen = self._random.choice(sorted(self._waiting))
                self._waiting.remove(chosen)
                self._next = chosen
                self._changed.notify_all()


class Stepped:
    """A connection to a store, each operation of which takes a turn."""

    def __init__(self, store: MemoryStore, turns: Turns, name: str) -> None:
        self._store = store
        self._turns = turns
        self._name = name

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        work = getattr(self._store, operation)

        def turn(*args: Any) -> Any:
            if operation == "wait_for":  # waiting takes no turn, going on does
                work(*args)
            self._turns.take(f"{self._name} {threading.current_thread().name}")
            return work(*args)

        return turn


class Training:
    """Ranks in threads, whose steps are collectives: each needs all of them."""

    def __init__(self, ranks: int, steps: int, told: list[tuple[int, int]], seed: int) -> None:
        self.ranks, self.steps, self.told = ranks, steps, told
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
        agreement = StopAgreement(CallLedger(store, store, "stop", rank, self.ranks), 1)
        try:
            if (rank, 0) in self.told:
                agreement.request("before the first step")
            step, stopped = 0, False
            while step < self.steps and not stopped:
                self.turns.take(f"rank {rank} trains")
                self.collective.wait(NET_S)
                step += 1
                if (rank, step) in self.told:
                    agreement.request(f"in step {step}")
                stopped = agreement.ends_after(step, NET_S)
            self.ended[rank] = step, stopped
        finally:
            agreement.close()


@given(data=st.data())
def test_all_stop_after_the_same_step(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    steps = data.draw(st.integers(1, 6) | st.just(25))
    told = data.draw(
        st.lists(
            st.tuples(st.integers(0, ranks - 1), st.integers(0, min(steps, 8))),
            max_size=3,
            unique=True,
        )
    )
    training = Training(ranks, steps, told, data.draw(st.integers(0, 2**32)))
    training.run()
    assert training.errors == []
    assert len(training.ended) == ranks
    assert len(set(training.ended.values())) == 1
    step, stopped = training.ended[0]
    if not told:
        assert (step, stopped) == (steps, False)
    if told and not stopped:
        assert step == steps, "the word came when the training was as good as over"


def test_the_word_comes_in_time() -> None:
    """A training that is long enough is stopped, whoever was told."""
    for rank in range(3):
        training = Training(3, 10_000, [(rank, 2)], seed=rank)
        training.run()
        assert training.errors == []
        (end,) = set(training.ended.values())
        assert end[1]
        assert 2 <= end[0] < 10_000


# -- by hand ------------------------------------------------------------------------------------


class Fragile(MemoryStore):
    """A store that can be lost, at which whoever waits is told."""

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
    return [
        StopAgreement(CallLedger(store, store, "stop", rank, ranks), begun) for rank in range(ranks)
    ]


def await_word(agreement: StopAgreement) -> None:
    """Until the rank has said what it has begun."""
    with agreement._changed:
        agreement._changed.wait_for(lambda: agreement._decided is not None, NET_S)
    assert agreement._decided is not None


def test_no_rank_begins_a_step_after_the_one_that_the_farthest_has_begun() -> None:
    first, second = both = agreements(MemoryStore(), 2)
    assert not first.ends_after(1, NET_S), "has begun the second step"
    second.request("the machine is wanted back")
    await_word(first)
    await_word(second)
    assert not second.ends_after(1, NET_S)
    assert first.ends_after(2, NET_S)
    assert second.ends_after(2, NET_S)
    for each in both:
        assert each.reason.startswith("rank 1 on ")
        assert each.reason.endswith(": the machine is wanted back")
        each.close()


def test_told_before_the_first_step() -> None:
    (alone,) = agreements(MemoryStore(), 1)
    alone.request("at once")
    await_word(alone)
    assert alone.ends_after(1, NET_S)
    alone.close()


def test_told_again_and_again() -> None:
    first, second = agreements(MemoryStore(), 2, begun=8)
    for each in (first, second, first):
        each.request("now")
    await_word(first)
    await_word(second)
    assert first.ends_after(8, NET_S)
    assert second.ends_after(8, NET_S)
    second.close()
    first.close()


def test_a_rank_that_never_answers_is_not_waited_for_for_ever() -> None:
    store = MemoryStore()
    alone = StopAgreement(CallLedger(store, store, "stop", 0, 2), 1)
    alone.request("now")
    while store.read("stop/0/part/0") is None:
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match=r"told to stop \(rank 0 on .*now\), but not all"):
        alone.ends_after(1, 0.01)
    alone.close()


@pytest.mark.parametrize("closed", [0, 1])
def test_a_rank_whose_training_is_over_stops_nobody(closed: int) -> None:
    both = agreements(MemoryStore(), 2)
    both[closed].close()
    other = both[1 - closed]
    other.request("too late")
    await_word(other)
    assert not other.ends_after(1, NET_S)
    other.close()


def test_closing_in_any_order_with_the_word_on_its_way() -> None:
    for first in (0, 1, 2):
        three = agreements(MemoryStore(), 3)
        three[1].request("now")
        for i in range(3):
            three[(first + i) % 3].close()


def test_a_lost_store_is_no_reason_to_stop_but_told_it_is_an_error() -> None:
    store = Fragile()
    both = agreements(store, 2)
    store.lose()
    assert not both[0].ends_after(1, NET_S)
    both[0].request("now")
    with pytest.raises(CheckpointError, match=r"told to stop .*now.* the store is gone"):
        for step in range(2, 1_000_000):
            assert not both[0].ends_after(step, NET_S)
    for each in both:
        each.close()


def test_a_store_that_is_lost_before_the_decision() -> None:
    store = Fragile()
    alone = StopAgreement(CallLedger(store, store, "stop", 1, 2), 1)
    alone.request("now")
    while store.read("stop/0/part/1") is None:
        time.sleep(0.001)
    store.lose()
    with pytest.raises(CheckpointError, match="the store is gone"):
        alone.ends_after(1, NET_S)
    alone.close()


# -- signals ------------------------------------------------------------------------------------


class Told:
    """In the place of an agreement."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def request(self, why: str) -> None:
        self.words.append(why)


def test_the_second_signal_does_what_it_did_before() -> None:
    mine: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: mine.append(number))
    try:
        told: Any = Told()
        signals = Signals([signal.SIGUSR2], told)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (told.words, mine) == (["signal SIGUSR2"], [])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (told.words, mine) == (["signal SIGUSR2"], [signal.SIGUSR2])
        signals.close()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_where_nobody_had_a_handler_the_second_one_kills() -> None:
    told: Any = Told()
    signals = Signals([signal.SIGUSR2, signal.SIGTERM], told)
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.words == ["signal SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) == signals._take
    signals.close()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_handler_that_somebody_has_put_in_its_place_stays() -> None:
    signals = Signals([signal.SIGUSR2], Told())  # type: ignore[arg-type]
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signals.close()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_thread_cannot_take_signals() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    def make() -> None:
        Signals([signal.SIGUSR2], Told()).close()  # type: ignore[arg-type]

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) == before
