"""The decisions about hosts that are to leave, without hosts."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from launch.hosts.test_decider import LIMITS, WRAPPED, Rules, group, running
from outlast.launch.hosts.job.waiting import Facts
from outlast.launch.hosts.named_hosts import NoSuchHost, asked_of
from outlast.launch.hosts.plan import (
    Entry,
    JobPlan,
    Leave,
    Move,
    MoveRank,
    Restart,
    Return,
    Start,
    Stay,
    Stop,
    Take,
)

TERM = int(signal.SIGTERM)
KNOWN = dataclasses.replace(WRAPPED, least=1, there=frozenset("abcd"))


def told(plan: JobPlan, *hosts: str, number: int = 0) -> JobPlan:
    """These hosts are to leave a job of the hosts a to d, or of those that there are."""
    for host in hosts:
        plan = plan.apply(Leave(host, "told", number))
    return plan


def decided(there: str, plan: JobPlan, facts: Facts = KNOWN, at: float = 0.0) -> Entry | None:
    rules = Rules(LIMITS, 1, 1)
    hosts = group(there)
    rules.next_entry(hosts.of(plan), hosts, facts, 0.0)
    return rules.next_entry(hosts.of(plan), hosts, facts, at)


def job(there: str, places: str) -> JobPlan:
    return group(there).of(running(places))


def test_a_spare_gets_the_ranks_of_a_host_that_is_to_leave() -> None:
    plan = told(job("abcd", "abc"), "b")
    assert decided("abcd", plan) == Move("b", "d")
    after = plan.apply(Move("b", "d"))
    assert (after.places, after.taken_over, after.moves) == (("a", "d", "c"), (0, 1, 0), {"b": 1})
    assert after.waiting_to_leave == []
    assert after.predecessor("d") == Leave("b", "told")
    assert group("acd", lost="b").of(after).predecessor("d") is None
    assert decided("abcd", after) is None


def test_the_job_waits_for_a_spare_and_goes_on_smaller_if_it_may() -> None:
    plan = told(job("abc", "abc"), "b")
    assert decided("abc", plan) is None
    assert decided("abc", plan, at=1.0) == Move("b")
    assert plan.apply(Move("b")).given_up == {1}
    needs_all = dataclasses.replace(KNOWN, least=3)
    assert decided("abc", plan, needs_all, at=599.0) is None
    late = decided("abc", plan, needs_all, at=600.0)
    assert isinstance(late, Stay)
    assert plan.apply(late).drains == {}


def test_hosts_that_are_told_by_a_signal_together_are_a_stop() -> None:
    plan = told(job("abc", "abc"), "b", number=TERM)
    assert decided("abc", plan, at=0.9) is None  # whether more are told
    assert decided("abc", plan, at=1.0) == Move("b")
    assert decided("abc", told(plan, "c", number=TERM)) == Stop(TERM, "c")  # 1 left, and 2 needed
    needs_all = dataclasses.replace(KNOWN, least=3)
    assert decided("abc", plan, needs_all, at=1.0) == Stop(TERM, "b")
    all_hosts = Rules(dataclasses.replace(LIMITS, minimum=3), 1, 1)
    assert all_hosts.next_entry(plan, group("abcd"), needs_all, 0.0) is None
    assert all_hosts.next_entry(plan, group("abcd"), needs_all, 1.0) == Move("b", "d")
    assert all_hosts.next_entry(plan, group("abc"), needs_all, 1.0) == Stop(TERM, "b")


def test_a_signal_that_follows_a_request_counts_once() -> None:
    plan = told(job("abc", "abc"), "b")
    by_signal = told(plan, "b", number=TERM)
    assert by_signal.drains["b"].signal == TERM
    assert told(by_signal, "b", number=TERM).drains == by_signal.drains


def test_a_lost_host_gets_the_spare_first() -> None:
    hosts = group("acd", lost="b")
    plan = hosts.of(running("abc")).apply(Leave("c", "told"))
    assert Rules(LIMITS, 1, 1).next_entry(plan, hosts, KNOWN, 0.0) == Take(1, "d")


def test_a_job_without_wrapper_restarts_without_the_host() -> None:
    restart = decided("abc", told(job("abc", "abc"), "b"), Facts())
    assert isinstance(restart, Restart)
    assert not restart.counts
    assert decided("abc", told(job("abc", "abc"), "b", number=TERM), Facts()) == Stop(TERM, "b")


def test_of_several_hosts_those_leave_that_the_job_can_do_without() -> None:
    plan = told(job("abc", "abc"), "b", "c")
    assert decided("abc", plan, at=1.0) == Move("b")
    after = plan.apply(Move("b"))
    assert decided("abc", after, at=599.0) is None
    assert isinstance(decided("abc", after, at=600.0), Stay)


def test_ranks_stay_if_the_host_is_lost_that_was_to_take_them() -> None:
    moving = told(job("abcd", "abc"), "b").apply(Move("b", "d"))
    hosts, rules = group("abc", lost="d"), Rules(LIMITS, 1, 1)
    unasked = dataclasses.replace(KNOWN, least=3, unasked={"b"})
    lost = hosts.of(moving)
    assert rules.next_entry(moving, hosts, unasked, 0.0) == Return("b")
    back = lost.apply(Return("b"))
    assert (back.places, back.moves, back.missing()) == (("a", "b", "c"), {}, [])
    assert decided("abce", back, unasked) == Move("b", "e")
    # Once they were asked to leave, the next host gets them.
    hosts = group("abce", lost="d")
    assert Rules(LIMITS, 1, 1).next_entry(moving, hosts, KNOWN, 0.0) == Take(1, "e")


def test_a_host_takes_ranks_over_before_it_leaves_itself() -> None:
    plan = told(told(job("abcd", "abc"), "b").apply(Move("b", "d")), "d", number=TERM)
    assert decided("abcde", plan, at=1.0) is None
    hosts, rules = group("acde", lost="b"), Rules(LIMITS, 1, 1)
    assert rules.next_entry(plan, hosts, KNOWN, 0.0) is None  # whether more are told
    assert rules.next_entry(plan, hosts, KNOWN, 1.0) == Move("d", "e")


def test_a_request_that_a_rank_moves_counts_once_and_goes_to_its_host() -> None:
    plan = group("abc").of(JobPlan().apply(Start(0, ("a", "b", "c"), nproc=2)))
    ((text, entry),) = asked_of(plan, (), 3, "it leaks", "a request").items()
    assert entry == MoveRank("b", 3, "it leaks", "a request")
    assert text.startswith("rank 3 of host b")
    after = plan.apply(entry)
    assert plan.if_new(entry) == entry
    assert after.if_new(entry) is None
    assert after.if_new(MoveRank("b", 3, "it leaks", "another one")) is not None
    with pytest.raises(NoSuchHost, match="no host runs rank 6; those that run: ranks 0 to 1, "):
        asked_of(plan, (), 6, "", "")


def test_a_host_whose_ranks_still_import_does_not_move_before_they_are_there() -> None:
    importing = dataclasses.replace(KNOWN, there=frozenset())
    for number in (0, TERM):
        plan = told(job("abcd", "abc"), "b", number=number)
        assert decided("abcd", plan, importing, at=2.0) is None
        assert decided("abcd", plan, at=2.0) == Move("b", "d")
        assert decided("abc", plan, importing, at=2.0) is None
        assert decided("abc", plan, at=2.0) == Move("b")
    needs_all = dataclasses.replace(importing, least=3)
    assert decided("abc", told(job("abc", "abc"), "b", number=TERM), needs_all, 1.0) == Stop(
        TERM, "b"
    )
