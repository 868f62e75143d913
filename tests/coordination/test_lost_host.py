"""The loss of a whole host, after every number of steps that its processes had made."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from outlast.coordination.membership import RESTART, MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import LostRecord, process_token
from outlast.coordination.stores.store import MemoryStore
from outlast.events.fault_record import FaultRecord

CAUSE = FaultRecord(0, -1, -1, "h2", 0, "UNRESPONSIVE", "host h2 is lost")


class Job:
    """Ranks 0 and 1 on host `a`, ranks 2 and 3 on host `b`."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.membership = MembershipProtocol(Link("call/"), 4)

    def __call__(self, step: Coroutine[Any, Any, Any]) -> Any:
        return drive(step, perform_on(self.store))

    def steps(self, coroutine: Coroutine[Any, Any, Any], number: int) -> bool:
        """The first operations of a process that then dies; whether there were fewer."""
        perform = perform_on(self.store)
        try:
            op = coroutine.send(None)
            for _ in range(number):
                op = coroutine.send(perform(op))
        except StopIteration:
            return True
        coroutine.close()
        return False

    async def enter(self, rank: int, token: str, host: str) -> int:
        token = process_token(host, token)
        member = await self.membership.register(rank, token)
        if member is None:
            member = await self.membership.ask_to_join(rank, token)
        return member

    def lose(self, host: str, ranks: range) -> frozenset[int]:
        members: frozenset[int] = self(self.membership.report_ended(host, ranks, CAUSE))
        return members

    @property
    def ledger(self) -> list[int]:
        return [record.member for record in self(self.membership.ledger())]


def lived_for(most: int) -> list[int]:
    return list(range(most + 1))


@pytest.mark.parametrize("steps", lived_for(3))
def test_the_first_member_of_a_rank_is_lost_wherever_its_process_was(steps: int) -> None:
    job = Job()
    for rank in (0, 1):
        job(job.enter(rank, f"a{rank}", "a"))
    job(job.enter(2, "b2", "b"))
    job.steps(job.enter(3, "b3", "b"), steps)
    assert job.lose("b", range(2, 4)) == {2, 3}
    assert sorted(job.ledger) == [2, 3]
    faults = job(job.membership.faults(0))
    assert [(f.member, f.rank, f.cause) for f in faults] == [
        (member, member, "host h2 is lost") for member in (2, 3)
    ]
    assert job(job.membership.over(0)) == RESTART
    assert job(job.membership.register(3, "again")) is None  # a replacement asks to join


@pytest.mark.parametrize("steps", lived_for(5))
def test_a_replacement_is_lost_once_it_has_asked_to_join(steps: int) -> None:
    job = Job()
    for rank in range(4):
        job(job.enter(rank, f"first{rank}", "a"))
    replacement = job.enter(3, "second", "b")
    done = job.steps(replacement, steps)
    asked = [joiner.member for joiner in job(job.membership.joiners())]
    assert job.lose("b", range(3, 4)) == frozenset(asked)
    assert job.ledger == asked
    assert bool(asked) or not done


def test_the_members_on_other_hosts_with_the_same_ranks_stay() -> None:
    job = Job()
    for rank in range(4):
        job(job.enter(rank, f"first{rank}", "a"))
    assert job.lose("b", range(2, 4)) == frozenset()
    assert job.ledger == []
    assert job(job.membership.over(0)) is None


def test_a_second_report_records_nothing_twice() -> None:
    job = Job()
    for rank in range(4):
        job(job.enter(rank, f"p{rank}", "ab"[rank // 2]))
    assert job.lose("b", range(2, 4)) == {2, 3}
    assert job.lose("b", range(2, 4)) == frozenset()
    assert job.ledger == [2, 3]


@pytest.mark.parametrize("steps", range(12))
def test_a_process_that_died_before_it_entered_is_lost_with_its_host(steps: int) -> None:
    job = Job()
    job(job.enter(2, "b2", "b"))
    job.steps(job.membership.report_killed("b/b3", 3, -1, CAUSE), steps)
    job.lose("b", range(2, 4))
    assert set(job.ledger) == {2, 3}
    assert job(job.membership.over(0)) == RESTART


def test_the_loss_of_a_host_whose_members_were_discarded_restarts_nothing() -> None:
    job = Job()
    for rank in range(4):
        job(job.enter(rank, f"p{rank}", "aaab"[rank]))
    job(job.membership.report_lost(LostRecord(3, "discarded", discarded=True), 0))
    assert job.lose("b", range(3, 4)) == frozenset()
    assert job(job.membership.over(0)) is None


@pytest.mark.parametrize("steps", range(40))
def test_another_reporter_finishes_what_a_dead_one_began(steps: int) -> None:
    job = Job()
    for rank in range(4):
        job(job.enter(rank, f"p{rank}", "ab"[rank // 2]))
    for member in (0, 1):
        expected = job(job.membership.view(0)).expected
        job(job.membership.leave(0, member, expected, {}))
    job.steps(job.membership.report_ended("b", range(2, 4), CAUSE), steps)
    job.lose("b", range(2, 4))
    assert set(job.ledger) == {2, 3}
    assert job(job.membership.over(0)) == RESTART
    assert job(job.membership.view(1)).expected == {0, 1}
