"""The protocol of one call, step by step, on a store in memory; `tests/simulation` has the rest."""

from __future__ import annotations

import functools
from collections.abc import Coroutine
from typing import Any

import pytest

from outlast.coordination import barrier
from outlast.coordination.barrier import arrive, done_key
from outlast.coordination.decision import Held, Reached, Rules, decode_record
from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol
from outlast.coordination.ops import Link, Op, drive, perform_on, run
from outlast.coordination.records import (
    SUSPECTED_LINK,
    LostRecord,
    SizeRecord,
    StopRecord,
    suspects_link,
)
from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.coordination.stores.store import MemoryStore
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import RestartCount
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.recovery.waits import end_iteration_to_join


class Call:
    """A job on a separate store: `call(job.end(0, RESTART))`."""

    def __init__(self, size: int = 2, rules: Rules | None = None) -> None:
        self.store = MemoryStore()
        self.membership = MembershipProtocol(Link(), size, rules)

    def __call__(self, step: Coroutine[Any, Any, Any]) -> Any:
        return drive(step, perform_on(self.store))

    def start(self, iteration: int, *members: int) -> None:
        """All members of the view arrive at the function."""
        view = self(self.membership.view(iteration))
        for rank, member in enumerate(members):
            said = {"rank": rank, "world_size": len(members)}
            self(arrive(self.membership.link, f"start/{iteration}", member, view.expected, **said))

    def leave(self, iteration: int, *members: int) -> None:
        """These members leave the iteration."""
        expected = self(self.membership.view(iteration)).expected
        for member in members:
            self(self.membership.leave(iteration, member, expected, {}))

    def join(self, preferred: int) -> None:
        """A process asks to join, and looks whether the decision can be made."""
        member = self(self.membership.ask_to_join(preferred, "x"))
        view = self(self.membership.view(0))
        self(end_iteration_to_join(self.membership, GrowPolicy.AT_NEXT_RESTART, 0, view, member))


def raised(member: int, iteration: int = 0) -> FaultRecord:
    return FaultRecord(iteration, member, member, "node", 100, "EXCEPTION", "ValueError: bad")


def hung() -> FaultRecord:
    return FaultRecord(0, 1, 1, "node", 100, "SOFT_TIMEOUT", "no progress")


def killed(iteration: int = 0) -> FaultRecord:
    return FaultRecord(iteration, -1, 1, "node", 100, "TERMINATED", "killed")


def test_a_first_place_is_given_once() -> None:
    call = Call()
    assert call(call.membership.register(1, "a")) == 1
    assert call(call.membership.register(1, "a")) == 1  # its monitor asks on its behalf
    assert call(call.membership.register(1, "b")) is None
    assert call(call.membership.register(2, "c")) is None
    assert call(call.membership.view(0)).expected == {0, 1}


def test_newcomers_get_ids_of_their_own() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    assert call(call.membership.ask_to_join(1, "x")) == 2
    assert call(call.membership.ask_to_join(-1, "y")) == 3
    asked = [(j.member, j.preferred, j.token) for j in call(call.membership.joiners())]
    assert asked == [(2, 1, "x"), (3, -1, "y")]


def test_the_first_end_of_an_iteration_stands() -> None:
    call = Call()
    assert call(call.membership.over(0)) is None
    call(call.membership.finish(0, 2))
    assert call(call.membership.over(0)) is None
    call(call.membership.finish(0, 2))
    assert call(call.membership.end(0, RESTART)) == call(call.membership.over(0)) == COMPLETED


def test_a_fault_ends_the_iteration() -> None:
    call = Call()
    call(call.membership.report_fault(killed()))
    assert call(call.membership.over(0)) == RESTART
    assert call(call.membership.faults(0)) == [killed()]


def test_a_death_is_recorded_and_wakes_all_that_wait() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call(call.membership.register(1, "b"))
    call.leave(0, 0)
    assert call(call.membership.decision(1)) is None
    call(call.membership.report_killed("b", 1, 1, killed()))
    assert call(call.membership.over(0)) == RESTART
    assert call(call.membership.ledger()) == [LostRecord(1, "killed")]
    assert [f.member for f in call(call.membership.faults(0))] == [1]
    decision = call(call.membership.decision(1))
    assert (decision.view.expected, decision.cause.member, decision.reporter) == ({0}, 1, 0)


def test_a_process_that_died_before_it_registered_is_not_waited_for() -> None:
    call = Call()
    call(call.membership.report_killed("b", 1, -1, killed()))
    assert call(call.membership.ledger()) == [LostRecord(1, "killed")]
    assert call(call.membership.register(1, "new")) is None


def test_a_newcomer_that_died_is_found_by_its_token() -> None:
    call = Call()
    call(call.membership.register(1, "a"))
    call(call.membership.ask_to_join(1, "x"))
    call(call.membership.report_killed("x", 1, -1, killed()))
    assert [lost.member for lost in call(call.membership.ledger())] == [2]


def test_a_newcomer_that_had_not_asked_is_nobodys_loss() -> None:
    call = Call()
    call(call.membership.register(1, "a"))
    call(call.membership.report_killed("x", 1, -1, killed()))
    assert call(call.membership.ledger()) == call(call.membership.faults(0)) == []


def test_a_loss_reaches_every_later_view_that_has_the_member() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.end(0, RESTART))
    call.leave(0, 0, 1)
    call(call.membership.report_lost(LostRecord(1, "gone"), 0))
    assert call(call.membership.over(1)) == RESTART
    assert done_key("start/1") not in call.store.table
    call.start(1, 0)
    assert done_key("start/1") in call.store.table


def test_the_next_view_has_the_survivors_and_who_asked() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_lost(LostRecord(1, "gone"), 0))
    call(call.membership.ask_to_join(1, "x"))
    call.leave(0, 0)
    decision = call(call.membership.decision(1))
    assert decision.view.slots() == (0, 2)
    assert call(call.membership.decide(0, Reached.ARRIVED)) == decision  # decided before
    assert call(call.membership.current()) == 1


def test_a_job_that_does_not_grow_takes_nobody_in() -> None:
    call = Call(rules=Rules(grow=False))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.ask_to_join(1, "x"))
    call.leave(0, 0, 1)
    assert call(call.membership.view(1)).expected == {0, 1}


def test_the_rules_are_those_of_the_first_process() -> None:
    call = Call(rules=Rules(grow=False, repeated=RepeatedFaults(5, backoff=2)))
    call(call.membership.register(0, "a"))
    other = MembershipProtocol(Link(), 2, Rules())
    call(other.register(1, "b"))
    assert (
        call(other.rules())
        == call(MembershipProtocol(Link(), 2).rules())
        == Rules(grow=False, repeated=RepeatedFaults(5, backoff=2))
    )


def test_the_first_claim_of_a_decision_stands_and_what_it_lacks_is_in_the_next() -> None:
    call, late = Call(), MembershipProtocol(Link(), 2)
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(killed()))
    decide = late.decide(
        0, Reached.ARRIVED
    )  # a process that is stopped after it has read the facts
    for member in (0, 1):
        record = barrier.record_arrival(Link(), "term/0", member, frozenset({0, 1}), {})
        call(record)
    op, perform = decide.send(None), perform_on(call.store)
    while op.name != "claim":
        op = decide.send(perform(op))
    call.join(-1)  # decides, with itself
    assert call(call.membership.view(1)).expected == {0, 1, 2}
    with pytest.raises(StopIteration) as ended:
        decide.send(perform(op))
    assert ended.value.value == call(call.membership.decision(1))


def test_who_adds_the_last_fact_that_a_held_restart_waits_for_decides() -> None:
    def held() -> Call:
        call = Call(rules=Rules(await_size=2))
        call(call.membership.register(0, "a"))
        call.start(0, 0, 1)
        call(call.membership.report_lost(LostRecord(1, "gone"), 0))
        call.leave(0, 0)
        assert decode_record(call.store.table["decision/1/0"]) == Held(False, frozenset({1}))
        assert call(call.membership.size()).ranks == 1
        assert call(call.membership.decision(1)) is None
        return call

    call = held()
    call.join(1)
    assert call(call.membership.view(1)).slots() == (0, 2)
    call = held()
    call(call.membership.give_up(frozenset({1})))
    assert call(call.membership.view(1)).expected == {0}
    call = held()
    call(call.membership.request_stop(StopRecord("SIGTERM", 143)))
    assert call(call.membership.view(1)).stop == StopRecord("SIGTERM", 143)
    call = held()  # the time is over
    call(call.membership.decide(0, Reached.TIMEOUT, Held(False)))
    assert call(call.membership.decision(1)).unreplaced == {1}


@pytest.mark.parametrize("active", [2, 3])
def test_a_restart_is_held_where_fewer_members_are_left_than_were_active(active: int) -> None:
    call = Call(4, Rules(await_size=4, reserve=True))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1, 2, 3)
    for member in (2, 3):
        call(call.membership.report_lost(LostRecord(member, "gone"), 0))
    expected = call(call.membership.view(0)).expected
    for member in (0, 1):
        call(call.membership.leave(0, member, expected, {"active": active}))
    record = decode_record(call.store.table["decision/1/0"])
    assert isinstance(record, Held) == (active == 3)


def test_a_member_of_a_held_restart_that_was_mistaken_for_lost_is_told() -> None:
    call = Call(3, Rules(await_size=3))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1, 2)
    call(call.membership.report_lost(LostRecord(2, "gone"), 0))
    call.leave(0, 0, 1)
    call(call.membership.report_lost(LostRecord(1, "no heartbeat"), 0))
    assert decode_record(call.store.table["decision/1/1"]) == Held(False, frozenset({1, 2}))


def test_the_end_of_a_member_that_had_left_the_iteration_is_not_its_cause() -> None:
    call = Call(3)
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1, 2)
    call(call.membership.report_fault(raised(0)))
    call.leave(0, 1)
    call(call.membership.report_killed("b", 1, 1, killed()))
    call.leave(0, 0, 2)
    decision = call(call.membership.decision(1))
    assert decision.cause == raised(0)
    assert decision.view.expected == {0, 2}


def test_a_decision_that_ends_the_job_has_no_successor() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(raised(1)))
    call(call.membership.report_lost(LostRecord(0, "enough", ends_job=True), 0))
    call.leave(0, 1)
    decision = call(call.membership.decision(1))
    assert decision.ended_by == LostRecord(0, "enough", ends_job=True)
    assert decision.last_cause == raised(1)
    call(call.membership.report_lost(LostRecord(1, "it was told to"), 1))
    assert call(call.membership.decision(2)) is None
    assert call(call.membership.restart_counts()) == ()


def test_an_end_of_the_job_is_no_restart() -> None:
    call, once = Call(), (RestartCount("ValueError", 1, (1,)),)
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(raised(1)))
    call.leave(0, 0, 1)
    assert call(call.membership.restart_counts()) == once
    call.start(1, 0, 1)
    call(call.membership.report_fault(raised(1, 1)))
    call(call.membership.report_lost(LostRecord(1, "enough", ends_job=True), 1))
    call.leave(1, 0)
    assert call(call.membership.decision(2)).ends
    assert call(call.membership.restart_counts()) == once


def test_a_job_that_is_complete_has_no_decision_after_it() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    for _ in range(2):
        call(call.membership.finish(0, 2))
    for member in range(2):
        call(call.membership.report_lost(LostRecord(member, "it has ended"), 0))
    assert call(call.membership.decision(1)) is None


def test_what_is_forgotten_can_neither_be_decided_anew_nor_waited_for() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(killed()))
    call.leave(0, 0, 1)
    call(call.membership.forget_before(8))
    assert call(call.membership.decide(0, Reached.LOST)) is None
    late = MembershipProtocol(call.membership.link, 2)  # it has not known the view before
    assert call(late.view(0)).expected == frozenset()
    assert call(call.membership.over(0)) == RESTART
    assert not [key for key in call.store.table if key.startswith(("start/0", "fault/0"))]


def test_the_keys_of_a_call_do_not_grow_with_its_restarts() -> None:
    call, sizes = Call(), []
    call(call.membership.register(0, "a"))
    for k in range(200):
        call.start(k, 0, 1)
        if k % 3 == 0:  # the others end before the function is called
            call(call.membership.forget_before(k))
        call(call.membership.report_fault(raised(k % 2, k)))
        call.leave(k, 0, 1)
        stays = [key for key in call.store.table if key.startswith(("decision/", "over/"))]
        sizes.append(len(call.store.table) - len(stays))
        assert len(call.store.table[f"decision/{k + 1}/0"]) < 2_000
    assert max(sizes[100:]) == max(sizes[60:100])
    assert len(stays) == 2 * 200 + 1  # see `forget_before`


def test_a_hang_or_an_error_of_the_network_makes_a_link_suspect() -> None:
    fault = functools.partial(FaultRecord, 0, 0, 0, "node", 100)
    assert suspects_link(fault("SOFT_TIMEOUT", "no progress"))
    assert suspects_link(fault("HARD_TIMEOUT", "no progress"))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: closed by peer", consequence=True))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: Gloo connectFullMesh failed"))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: Timed out waiting 1800000ms for recv"))
    assert not suspects_link(fault("EXCEPTION", "ValueError: planned"))
    assert not suspects_link(killed())


def test_a_restart_waits_until_the_launchers_know_which_links_are_broken() -> None:
    call = Call(rules=Rules(hosts=True, await_size=2))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(hung()))
    call.leave(0, 0, 1)
    assert decode_record(call.store.table["decision/1/0"]) == Held(True)
    prefix, _, iteration = call.store.table[SUSPECTED_LINK].decode().rpartition("links/")
    call(call.membership.report_lost(LostRecord(1, "its host leaves"), 0))  # for its links
    assert decode_record(call.store.table["decision/1/1"]) == Held(True, frozenset({1}))
    call(MembershipProtocol(Link(prefix), 0).links_known(int(iteration)))
    # The launchers are not asked again.
    assert decode_record(call.store.table["decision/1/2"]) == Held(False, frozenset({1}))
    call.join(1)
    assert call(call.membership.view(1)).slots() == (0, 2)
    call(call.membership.forget_before(8))
    assert not [key for key in call.store.table if key.startswith(("links/", "decision/0/1"))]


def test_a_launcher_that_says_again_which_links_are_broken_changes_nothing() -> None:
    call = Call(rules=Rules(hosts=True, await_size=2))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(hung()))
    call.leave(0, 0, 1)
    call(call.membership.links_known(0))
    call.start(1, 0, 1)
    call(call.membership.report_lost(LostRecord(1, "gone"), 1))
    call(call.membership.leave(1, 0, frozenset({0, 1}), {"least": 1}))
    assert call(call.membership.size()) == SizeRecord(ranks=1, least=1)
    told = dict(call.store.table)
    call(call.membership.links_known(0))
    assert call.store.table == told


def test_a_restart_that_waits_no_longer_for_the_launchers_does_not_do_so_again() -> None:
    call = Call(rules=Rules(hosts=True, await_size=2))
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(hung()))
    call(call.membership.report_lost(LostRecord(1, "gone"), 0))
    call.leave(0, 0)
    waits = decode_record(call.store.table["decision/1/0"])
    assert waits == Held(True, frozenset({1}))
    call(call.membership.decide(0, Reached.TIMEOUT, waits))  # its time is over
    assert decode_record(call.store.table["decision/1/1"]) == Held(False, frozenset({1}))
    call.join(1)
    assert call(call.membership.view(1)).slots() == (0, 2)


def test_no_link_is_suspect_when_the_job_is_made_to_grow_or_stops() -> None:
    closed = FaultRecord(0, 0, 0, "node", 100, "EXCEPTION", "closed by peer", consequence=True)
    for grows in (True, False):
        call = Call(rules=Rules(hosts=True))
        call(call.membership.register(0, "a"))
        call.start(0, 0, 1)
        if grows:
            call(call.membership.ask_to_join(-1, "x"))
        else:
            call(call.membership.request_stop(StopRecord("SIGTERM", 143)))
        call(call.membership.report_fault(closed if grows else hung()))
        call.leave(0, 0, 1)
        assert (call(call.membership.decision(1)).cause is None) == grows
        assert call.store.read(SUSPECTED_LINK) is None


def test_a_place_that_was_given_up_and_taken_is_waited_for_again() -> None:
    call = Call(4)
    call(call.membership.give_up(frozenset({1, 2, 3})))
    call(call.membership.take_back(frozenset({2, 3})))
    assert call(call.membership.given_up()) == {1}
    call(call.membership.give_up(frozenset({3})))
    assert call(call.membership.given_up()) == {1, 3}


def test_what_follows_a_killed_rank_takes_few_requests() -> None:
    # With the store on etcd each takes milliseconds, and the others wait for all of them. What has
    # no answer leaves with the next request.
    call = Call(rules=Rules(await_size=2))
    for rank in range(2):
        call(call.membership.register(rank, f"rank {rank}"))
    call.start(0, 0, 1)
    asked: list[str] = []

    def process() -> MembershipProtocol:
        def perform(op: Op) -> Any:
            if op.name not in ("put", "append"):
                asked.append(op.name)
            return perform_on(call.store)(op)

        asked.clear()
        return MembershipProtocol(Link(perform=perform), 2, Rules(await_size=2))

    monitor = process()
    run(monitor.report_killed("rank 1", 1, 1, killed(0)))
    assert len(asked) == 6, asked
    call.leave(0, 0)  # and waits for a replacement
    assert isinstance(decode_record(call.store.table["decision/1/0"]), Held)
    replacement = process()
    assert run(replacement.register(1, "another")) is None
    member = run(replacement.ask_to_join(1, "another"))
    view = run(replacement.view(run(replacement.current())))
    run(end_iteration_to_join(replacement, GrowPolicy.AT_ONCE, 0, view, member))
    assert len(asked) == 9, asked
    assert call(call.membership.view(1)).expected == {0, member}
