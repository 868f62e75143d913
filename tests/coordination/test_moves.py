"""Successors of ranks that are to leave, without processes: they count once these have left; and
joiners of a job that grows: they count whatever ends the iteration.
"""

from __future__ import annotations

import dataclasses

import pytest

from outlast.coordination import barrier, moves
from outlast.coordination.decision import Decision, Held, Reached, Rules
from outlast.coordination.membership import COMPLETED, MOVED, RESTART, MembershipProtocol
from outlast.coordination.ops import Link, perform_on, run
from outlast.coordination.records import LostRecord, StopRecord, process_token, to_line
from outlast.coordination.stores.store import MemoryStore
from outlast.events import restart_causes
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import JOINED, Interruption, RestartCount, describe_restarts
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.recovery.waits import end_iteration_to_join

SIZE, LEAVING = 4, range(2, 4)


class Call:
    """A call with four members on the hosts `old-0` and `old-1`, two on each."""

    def __init__(self) -> None:
        link = Link(perform=perform_on(MemoryStore()))
        self.membership = MembershipProtocol(link, SIZE, Rules(await_size=SIZE))
        for rank in range(SIZE):
            run(self.membership.register(rank, process_token(f"old-{rank // 2}", str(rank))))

    def asks(self, rank: int) -> int:
        """A successor of this rank of `old-1` asks; returns its member."""
        before = run(moves.holder(self.membership, rank, "old-1"))
        token = process_token("new", str(rank))
        member = run(self.membership.ask_to_join(rank, token, before))
        run(moves.succeed(self.membership, LEAVING, "old-1", "why"))
        return member

    def requested(self) -> moves.LeaveRequest | None:
        return run(moves.requests(self.membership, frozenset(range(SIZE))))[1]

    def lose(self, member: int, *, moved: bool) -> None:
        fault = FaultRecord(0, member, member, "", 0, Interruption.TERMINATED.value, "died")
        lost = LostRecord(member, "why", moved=moved)
        run(self.membership.report_lost(lost, 0, None if moved else fault))

    def joins(self, rank: int) -> int:
        """A process that was started as this rank asks to join, and looks at the iteration."""
        member = run(self.membership.ask_to_join(rank, process_token("new", str(rank))))
        self.looks(member)
        return member

    def looks(self, member: int, iteration: int = 0) -> None:
        view = run(self.membership.view(iteration))
        at_once = GrowPolicy.AT_ONCE
        run(end_iteration_to_join(self.membership, at_once, iteration, view, member))

    def agrees(self, iteration: int = 0) -> None:
        """Rank 0 begins to wait for requests."""
        run(moves.begin_to_wait(self.membership, iteration, 1))

    def over(self) -> bytes | None:
        return run(self.membership.over(0))

    def leave(self, *members: int) -> Decision | Held | None:
        """These members leave the iteration, and wait for the next one."""
        for member in members:
            run(self.membership.leave(0, member, frozenset(range(SIZE)), {}))
        return run(self.membership.decide(0, Reached.ARRIVED))


def test_ranks_are_asked_to_leave_when_each_has_a_successor() -> None:
    call = Call()
    call.asks(3)
    assert call.requested() is None
    call.asks(2)
    request = call.requested()
    assert request == moves.LeaveRequest((2, 3), "why")
    assert run(call.membership.link.read(moves.leave_key(0, 0))) is not None
    call.lose(2, moved=True)
    left = run(moves.requests(call.membership, frozenset({0, 1, 3})))[1]
    assert left is not None
    assert left.members == (3,)


def test_successors_have_the_ranks_of_those_that_left_and_no_rank_failed() -> None:
    call = Call()
    third, second = call.asks(3), call.asks(2)
    for member in LEAVING:
        call.lose(member, moved=True)
    decision = call.leave(0, 1)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (0, 1, second, third)
    assert decision.cause is None
    assert decision.history.restarts == (RestartCount(restart_causes.MOVED),)
    assert describe_restarts(decision.history.restarts) == "1 move"


def test_a_fault_before_the_move_admits_no_successor() -> None:
    call = Call()
    call.asks(2)
    call.asks(3)
    call.lose(1, moved=False)
    held = call.leave(0, 2, 3)
    # The successors do not stand in for the rank that is lost.
    assert isinstance(held, Held)
    assert held.ranks == (1,)
    member = run(call.membership.ask_to_join(1, process_token("old-0", "again")))
    decision = run(call.membership.decide(0, Reached.ASKED))
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (0, member, 2, 3)


def test_a_successor_takes_the_place_of_a_rank_that_dies_instead_of_leaving() -> None:
    call = Call()
    second = call.asks(2)
    call.lose(2, moved=False)
    decision = call.leave(0, 1, 3)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (0, 1, second, 3)
    assert decision.cause is not None


def test_a_rank_that_dies_before_it_moves_gets_one_process_its_hosts_or_its_successor() -> None:
    call = Call()
    for member in LEAVING:
        call.lose(member, moved=False)
    m = call.membership
    assert run(moves.replaces(m, 2, "old-1"))  # its launcher is first
    assert run(moves.replaces(m, 2, "old-1"))  # for a replacement that has not asked
    replacement = run(m.ask_to_join(2, process_token("old-1", "again")))
    assert run(moves.succeeded(m, 2, "old-1", "new")) == replacement
    assert not run(moves.replaces(m, 2, "old-1"))  # now its successor has begun to ask
    assert run(moves.succeeded(m, 3, "old-1", "new")) == 3  # its successor is first
    assert run(moves.succeeded(m, 3, "old-1", "newer")) == 3  # that one's, too
    assert not run(moves.replaces(m, 3, "old-1"))


@pytest.mark.parametrize("lost", [True, False])
def test_a_successor_waits_for_a_replacement_no_longer_than_for_its_host_and_the_job(
    lost: bool,
) -> None:
    call = Call()
    call.lose(2, moved=False)
    assert run(moves.replaces(call.membership, 2, "old-1"))
    if lost:
        fault = FaultRecord(0, -1, 2, "", -1, Interruption.TERMINATED.value, "the host was lost")
        run(call.membership.report_ended("old-1", LEAVING, fault))
    else:
        run(call.membership.link.put("current", b"1"))
        run(call.membership.end(1, COMPLETED))
    assert run(moves.succeeded(call.membership, 2, "old-1", "new")) == 2


def test_a_successor_that_died_has_one_too() -> None:
    call = Call()
    first = call.asks(2)
    run(call.membership.report_lost(LostRecord(first, "died"), 0))
    call.asks(3)
    assert call.requested() is None
    again = call.asks(2)
    assert call.requested() is not None
    joiners = {each.member: each for each in run(call.membership.joiners())}
    assert dataclasses.asdict(joiners[again])["succeeds"] == 2


def test_a_joiner_is_admitted_after_a_step_that_the_ranks_agree_on_as_a_move() -> None:
    call = Call()
    call.agrees()
    number, none = run(moves.requests(call.membership, frozenset(range(SIZE))))
    assert none is None
    members = call.joins(4), call.joins(5)
    assert call.over() is None
    assert run(call.membership.link.read(moves.leave_key(0, number))) is not None
    reason = "rank 4 joins; rank 5 joins"
    assert call.requested() == moves.LeaveRequest((), reason, joiners=members)
    run(call.membership.end(0, MOVED))
    decision = call.leave(0, 1, 2, 3)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (*range(SIZE), *members)
    assert decision.cause is None
    assert decision.history.restarts == (RestartCount(restart_causes.MOVED),)
    # Admitted, they ask for nothing more.
    assert run(moves.requests(call.membership, decision.view.expected))[1] is None


def test_without_an_agreement_on_steps_a_joiner_ends_the_iteration_at_once() -> None:
    call = Call()
    member = call.joins(4)
    assert call.over() == RESTART
    call.agrees()  # too late: the iteration is over
    assert call.requested() is None
    decision = call.leave(0, 1, 2, 3)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (*range(SIZE), member)
    assert decision.history.restarts == (RestartCount(JOINED),)


def test_a_replacement_waits_for_no_step() -> None:
    call = Call()
    call.agrees()
    member = call.joins(2)  # its predecessor is dead, and not yet known to be
    assert call.over() == RESTART
    assert call.requested() is None
    call.lose(2, moved=False)
    decision = call.leave(0, 1, 3)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (0, 1, member, 3)


def test_a_joiner_waits_for_no_step_that_a_lost_rank_cannot_make() -> None:
    call = Call()
    call.agrees()
    # Whoever wrote this died before it ended the iteration.
    line = to_line(LostRecord(3, "died"))
    run(call.membership.link.append(barrier.LEDGER, line))
    call.joins(4)
    assert call.over() == RESTART
    assert call.requested() is None


def test_a_fault_before_the_agreed_step_admits_the_joiners() -> None:
    call = Call()
    call.agrees()
    member = call.joins(4)
    run(call.membership.report_fault(FaultRecord(0, 1, 1, "", 0, "EXCEPTION", "ValueError: bad")))
    assert run(call.membership.end(0, MOVED)) == RESTART  # as rank 0 would, if it came so far
    decision = call.leave(0, 1, 2, 3)
    assert isinstance(decision, Decision)
    assert decision.view.slots() == (*range(SIZE), member)
    assert decision.cause is not None
    assert RestartCount(restart_causes.MOVED) not in decision.history.restarts


def test_while_a_rank_is_lost_a_joiner_decides_at_once() -> None:
    call = Call()
    call.agrees()
    call.lose(3, moved=False)
    assert isinstance(call.leave(0, 1, 2), Held)
    member = call.joins(4)  # nobody is left in the iteration
    assert call.requested() is None
    decision = run(call.membership.decision(1))
    assert decision is not None
    assert decision.view.slots() == (0, 1, 2, member)


def test_a_joiner_that_died_asks_for_nothing_and_a_late_one_in_the_next_iteration() -> None:
    call = Call()
    call.agrees()
    member = call.joins(4)
    run(call.membership.report_lost(LostRecord(member, "died"), 0))
    assert call.requested() is None
    run(call.membership.end(0, MOVED))
    decision = call.leave(0, 1, 2, 3)
    assert isinstance(decision, Decision)
    late = run(call.membership.ask_to_join(4, process_token("new", "late")))
    call.agrees(1)
    call.looks(late, 1)
    assert call.requested() == moves.LeaveRequest((), "rank 4 joins", joiners=(late,))


def test_a_joiner_leaves_a_job_alone_that_stops_or_is_over() -> None:
    call = Call()
    call.agrees()
    run(call.membership.request_stop(StopRecord("why", 143)))
    call.joins(4)
    assert call.requested() is None
    assert call.over() is None
    again = Call()
    again.agrees()
    run(again.membership.end(0, COMPLETED))
    again.joins(4)
    assert again.over() == COMPLETED  # for which the joiner waits
