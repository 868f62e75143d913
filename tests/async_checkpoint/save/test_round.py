"""The round of a save: whatever each rank does, all ranks see one outcome, and no key is left."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outlast.async_checkpoint.save.round import ABORTED, SaveRound
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import CheckpointError, CheckpointTimeout

NET_S = 60.0


class Ranks:
    """The ranks of one save, each in a thread, on a store in memory."""

    def __init__(
        self,
        world_size: int,
        divide: Callable[[Sequence[bytes]], dict[str, Any]],
        timeout_s: float = NET_S,
    ) -> None:
        self.store = MemoryStore()
        self.rounds = [
            SaveRound(CallLedger(self.store, "p", rank, world_size), 2, "save", divide, timeout_s)
            for rank in range(world_size)
        ]
        self.outcomes: dict[int, str] = {}
        self.said: list[bytes] = []

    def run(self, plan: Sequence[str], order: Sequence[int]) -> None:
        threads = [threading.Thread(target=self._take_part, args=(r, plan[r])) for r in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take_part(self, rank: int, what: str) -> None:
        ranks = self.rounds[rank]
        if "abort" in what:
            threading.Thread(target=lambda: ranks.fail(ranks.failure(ABORTED))).start()
        try:
            if "new" in what:
                assert ranks.agree(json.dumps(rank).encode())[str(rank)] == rank
            if "refuses" in what:
                raise CheckpointError("it cannot be saved")
        except CheckpointError as e:
            ranks.refuse(e)
            self.outcomes[rank] = "failed"
            return
        ranks.begin()
        outcome: str | CallFailure = json.dumps(f"record {rank}")
        if "fails" in what:
            outcome = ranks.failure("a disk is full")
        failure = ranks.report(outcome)
        if failure is None:
            if rank == 0:
                self.said = ranks.records()
                ranks.conclude({"size_bytes": 7})
            else:
                assert ranks.await_conclusion() == {"size_bytes": 7}
        ranks.forget()
        self.outcomes[rank] = "done" if failure is None else "failed"


def divide(parts: Sequence[bytes]) -> dict[str, Any]:
    return {str(json.loads(part)): json.loads(part) for part in parts if part}


def check(seed: int, kinds: Sequence[str]) -> None:
    chance = random.Random(seed)
    world_size = chance.choice((1, 2, 3, 5, 17))
    plan = ["same"] * world_size
    for _ in range(chance.randint(0, 3)):
        plan[chance.randrange(world_size)] = chance.choice(kinds)
    if chance.random() < 0.2:
        plan = ["new"] * world_size
    ranks = Ranks(world_size, divide)
    ranks.run(plan, chance.sample(range(world_size), world_size))
    assert set(ranks.outcomes) == set(range(world_size)), plan
    outcomes = set(ranks.outcomes.values())
    assert len(outcomes) == 1, (plan, ranks.outcomes)
    if all(what in ("same", "new") for what in plan):
        assert outcomes == {"done"}
    if any("fails" in what or "refuses" in what for what in plan):
        assert outcomes == {"failed"}
    if outcomes == {"done"}:
        assert list(map(json.loads, ranks.said)) == [f"record {r}" for r in range(world_size)]
    if not any("abort" in what for what in plan):  # one that comes last may leave its claim
        assert ranks.store.table == {}, plan


@pytest.mark.parametrize("seed", range(40))
def test_one_outcome(seed: int) -> None:
    check(seed, ("same", "new", "fails", "new, fails", "refuses", "new, refuses"))


@pytest.mark.parametrize("seed", range(40))
def test_one_outcome_of_saves_that_are_aborted(seed: int) -> None:
    check(seed, ("same", "new", "abort", "new, abort", "abort, fails"))


def test_an_agreement_that_fails_on_rank_0_fails_on_all_ranks() -> None:
    def fail(parts: Sequence[bytes]) -> dict[str, Any]:
        raise CheckpointError("shapes differ")

    for plan in (["new"] * 3, ["same", "new", "same"]):
        ranks = Ranks(3, fail)
        ranks.run(plan, range(3))
        assert set(ranks.outcomes.values()) == {"failed"}
        assert ranks.store.table == {}


def test_a_rank_that_does_not_come_to_an_agreement() -> None:
    ranks = Ranks(2, divide, 0.01)
    with pytest.raises(CheckpointTimeout, match="rank 1 waited for the other ranks to agree"):
        ranks.rounds[1].agree(b"1")
