"""The protocol of one call, step by step, on a store in memory; `tests/simulation` has the rest."""

from __future__ import annotations

import functools
from collections.abc import Coroutine
from typing import Any

from outlast.coordination import MemoryStore, drive, perform_on
from outlast.coordination.barrier import arrive, done_key
from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol
from outlast.coordination.ops import Link, Op
from outlast.coordination.records import (
    SUSPECTED_LINK,
    FaultRecord,
    LostRecord,
    SizeRecord,
    StopRecord,
    suspects_link,
)


class Call:
    """A job on a separate store: `call(job.end(0, RESTART))`."""

    def __init__(self, size: int = 2) -> None:
        self.store = MemoryStore()
        self.membership = MembershipProtocol(Link(), size)

    def __call__(self, step: Coroutine[Any, Any, Any]) -> Any:
        return drive(step, perform_on(self.store))

    def start(self, iteration: int, *members: int) -> None:
        """All members of the view arrive at the function."""
        view = self(self.membership.view(iteration))
        for rank, member in enumerate(members):
            said = {"rank": rank, "world_size": len(members)}
            self(arrive(self.membership.link, f"start/{iteration}", member, view.expected, **said))


def killed(iteration: int = 0) -> FaultRecord:
    return FaultRecord(iteration, -1, 1, "node", 100, "TERMINATED", "killed")


def test_a_first_place_is_given_once() -> None:
    call = Call()
    assert call(call.membership.register(1, "a")) == 1
    assert call(call.membership.register(1, "a")) == 1  # its monitor asks on its behalf
    assert call(call.membership.register(1, "b")) is None
    assert call(call.membership.register(2, "c")) is None
    assert call(call.membership.view(0)).expected == {0, 1}


def test_newcomers_get_ids_of_their_own_and_wake_those_that_wait() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    assert call(call.membership.ask_to_join(1, "x")) == 2
    assert call(call.membership.ask_to_join(-1, "y")) == 3
    asked = [(j.member, j.preferred, j.token) for j in call(call.membership.joiners())]
    assert asked == [(2, 1, "x"), (3, -1, "y")]
    assert {"joined/1", "joined/2"} <= set(call.store.table)


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
    call(arrive(call.membership.link, "term/0", 0, frozenset({0, 1})))
    assert done_key("term/0") not in call.store.table
    call(call.membership.report_killed(1, "b", 1, killed()))
    assert call(call.membership.over(0)) == RESTART
    assert call(call.membership.ledger()) == [LostRecord(1, "killed")]
    assert [f.member for f in call(call.membership.faults(0))] == [1]
    assert done_key("term/0") in call.store.table


def test_a_process_that_died_before_it_registered_is_not_waited_for() -> None:
    call = Call()
    call(call.membership.report_killed(1, "b", -1, killed()))
    assert call(call.membership.ledger()) == [LostRecord(1, "killed")]
    assert call(call.membership.register(1, "new")) is None


def test_a_newcomer_that_died_is_found_by_its_token() -> None:
    call = Call()
    call(call.membership.register(1, "a"))
    call(call.membership.ask_to_join(1, "x"))
    call(call.membership.report_killed(1, "x", -1, killed()))
    assert [lost.member for lost in call(call.membership.ledger())] == [2]


def test_a_newcomer_that_had_not_asked_is_nobodys_loss() -> None:
    call = Call()
    call(call.membership.register(1, "a"))
    call(call.membership.report_killed(1, "x", -1, killed()))
    assert call(call.membership.ledger()) == call(call.membership.faults(0)) == []


def test_a_loss_reaches_every_later_view_that_has_the_member() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.end(0, RESTART))
    call(call.membership.propose(1, grow=True))
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
    record = call(call.membership.propose(1, grow=True))
    assert record.slots() == (0, 2)
    assert call(call.membership.propose(1, grow=False)) == record  # decided before
    assert call(call.membership.current()) == 1


def test_a_job_that_does_not_grow_takes_nobody_in() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.ask_to_join(1, "x"))
    assert call(call.membership.propose(1, grow=False)).expected == {0, 1}


def test_what_is_forgotten_can_neither_be_decided_anew_nor_waited_for() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call.start(0, 0, 1)
    call(call.membership.report_fault(killed()))
    call(call.membership.forget(0))
    assert call(call.membership.view(0)).expected == frozenset()
    assert call(call.membership.over(0)) == RESTART
    assert not [key for key in call.store.table if key.startswith(("start/0", "fault/0"))]


def test_the_keys_of_a_call_do_not_grow_with_its_restarts() -> None:
    call, sizes = Call(), []
    call(call.membership.register(0, "a"))
    for k in range(200):
        call.start(k, 0, 1)
        if k % 3 == 0:  # the others end before the function is called
            call(call.membership.forget(k - 8))
        call(call.membership.report_fault(killed(k)))
        for _ in range(2):
            call(call.membership.wake_holders())
        call(call.membership.propose(k + 1, grow=True))
        stays = [key for key in call.store.table if key.startswith(("view/", "over/"))]
        sizes.append(len(call.store.table) - len(stays))
    assert max(sizes[100:]) == max(sizes[60:100])
    assert len(stays) == 2 * 200 + 1  # see `forget`


def test_the_member_that_ends_the_job_is_known() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    call(call.membership.report_lost(LostRecord(0, "left"), 0))
    assert call(call.membership.end_of_job()) is None
    call(call.membership.report_lost(LostRecord(1, "enough", ends_job=True), 0))
    assert call(call.membership.end_of_job()).reason == "enough"


def test_a_hang_or_an_error_of_the_network_makes_a_link_suspect() -> None:
    fault = functools.partial(FaultRecord, 0, 0, 0, "node", 100)
    assert suspects_link(fault("SOFT_TIMEOUT", "no progress"))
    assert suspects_link(fault("HARD_TIMEOUT", "no progress"))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: closed by peer", consequence=True))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: Gloo connectFullMesh failed"))
    assert suspects_link(fault("EXCEPTION", "RuntimeError: Timed out waiting 1800000ms for recv"))
    assert not suspects_link(fault("EXCEPTION", "ValueError: planned"))
    assert not suspects_link(killed())


def test_members_wait_until_the_launchers_know_which_links_are_broken() -> None:
    call = Call()
    hang = FaultRecord(0, 1, 1, "node", 100, "SOFT_TIMEOUT", "no progress")
    for member in (0, 1):
        call(call.membership.register(member, str(member)))
    waits = call.membership.await_links(0, hang, 60.0)
    operations = []

    def perform(op: Op) -> Any:
        operations.append((op.name, op.key))
        if op.name == "wait_for":  # the launcher answers under the key that it was told
            assert op.key == call.store.read(SUSPECTED_LINK).decode()
            call.store.put(op.key, b"1")
        return perform_on(call.store)(op)

    drive(waits, perform)
    assert operations[-1] == ("wait_for", "links/0")
    call(call.membership.await_links(0, hang, 0.0))
    assert call.store.add("suspect/0", 0) == 2
    call(call.membership.forget(0))
    assert not {"suspect/0", "links/0"} & set(call.store.table)


def test_no_link_is_suspect_when_the_job_is_made_to_grow_or_stops() -> None:
    call = Call()
    call(call.membership.register(0, "a"))
    closed = FaultRecord(0, 0, 0, "node", 100, "EXCEPTION", "closed by peer", consequence=True)
    call(call.membership.ask_to_join(-1, "x"))
    call(call.membership.await_links(0, closed, 60.0))
    hang = FaultRecord(0, 1, 1, "node", 100, "SOFT_TIMEOUT", "no progress")
    call(call.membership.request_stop(StopRecord("SIGTERM", 143)))
    call(call.membership.await_links(0, hang, 60.0))
    assert call.store.read(SUSPECTED_LINK) is None


def test_a_place_that_was_given_up_and_taken_is_waited_for_again() -> None:
    call = Call(4)
    call(call.membership.give_up(frozenset({1, 2, 3})))
    call(call.membership.take_back(frozenset({2, 3})))
    assert call(call.membership.given_up()) == {1}
    call(call.membership.give_up(frozenset({3})))
    assert call(call.membership.given_up()) == {1, 3}


def test_what_a_held_restart_needs_is_told_to_the_launchers() -> None:
    call = Call(4)
    assert call(call.membership.size()) is None
    size = SizeRecord(ranks=3, least=2, wait_s=5.0)
    call(call.membership.tell_size(size))
    assert call(call.membership.size()) == size
