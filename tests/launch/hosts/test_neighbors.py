"""Hosts are checked with their neighbors before they run ranks: the rules, and real pairs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal

import pytest

from launch.hosts.neighbor_pair import Pair
from launch.hosts.test_decider import LIMITS, WRAPPED, Hosts, group, led
from outlast.launch.hosts.host_entries import Check, Checked, Links, Probe
from outlast.launch.hosts.job import neighbors
from outlast.launch.hosts.job.decider import Decider, Facts, Wait
from outlast.launch.hosts.plan import End, Entry, JobPlan, Restart, Stage, Start, Take, decode
from procs import NET_S


class Checking:
    """A decider that checks, and the plan that follows from what it decides."""

    def __init__(self, minimum: int = 2) -> None:
        limits = dataclasses.replace(LIMITS, minimum=minimum)
        self._decider = Decider(limits, 1, 1, checks=True)
        self.plan = JobPlan()

    def next_entry(self, there: Hosts, facts: Facts = WRAPPED) -> Entry | None:
        self.plan = there.of(self.plan)
        facts = dataclasses.replace(facts, leader=there.leader)
        found = self._decider.decide(self.plan, facts, 0.0)
        return None if isinstance(found, Wait) else found

    def apply(self, *entries: Entry) -> None:
        for entry in entries:
            self.plan = self.plan.apply(decode(entry.encode()))

    def checks(self, there: Hosts, **reports: dict[str, str]) -> Entry | None:
        """What follows from the check of the hosts that are there, once all have reported."""
        ready = frozenset(host.id for host in there.hosts)
        check = self.next_entry(there, dataclasses.replace(WRAPPED, ready=ready))
        assert isinstance(check, Check)
        self.checked = check.hosts
        self.apply(check)
        waits = {host: {} for host in check.hosts[1:]}
        assert self.next_entry(there, dataclasses.replace(WRAPPED, checks=waits)) is None
        reported = {**{host: {} for host in check.hosts}, **reports}
        found = self.next_entry(there, dataclasses.replace(WRAPPED, checks=reported))
        if isinstance(found, Checked):
            self.apply(found)
        return found


def test_ranks_start_on_hosts_that_were_checked_together() -> None:
    job, there = Checking(), led("abc", "a")
    few = dataclasses.replace(WRAPPED, ready=frozenset("ab"))
    assert job.next_entry(there, few) is None  # c has no port yet
    assert job.checks(there) == Checked("check/0", ["a", "b", "c"])
    assert job.next_entry(there) == Start(0, ("a", "b", "c"))


def test_a_host_that_fails_with_both_neighbors_leaves_and_the_others_start() -> None:
    job, why = Checking(), "1 element is wrong"
    found = job.checks(led("abcd", "a"), b={"c": why}, d={"c": why})
    assert isinstance(found, Checked)
    assert found.waits_for == {"c": ["b", "d"]}
    assert found.excluded["c"] == (
        "host c (10.0.0.3) and host b (10.0.0.2), d (10.0.0.4) fail the check of neighbors: "
        "1 element is wrong. c leaves the job, and tries again"
    )
    assert job.next_entry(led("abd", "a")) == Start(0, ("a", "b", "d"))


def test_one_host_has_no_neighbor_and_is_checked_with_the_next_one() -> None:
    job = Checking(minimum=1)
    job._decider.decide(group("a").of(job.plan), WRAPPED, -100.0)  # since then it is enough
    assert job.next_entry(group("a")) == Start(0, ("a",))
    job.apply(Start(0, ("a",)))
    there = led("ab", "a")
    assert job.next_entry(there) is None
    assert job.checks(there) == Checked("check/1", ["a", "b"])
    assert job.next_entry(there) == Take(1, "b")


def test_a_new_host_leaves_and_not_the_checked_one_with_which_it_fails() -> None:
    job = Checking(minimum=3)
    job.checks(led("abz", "a"))
    job.apply(Start(0, ("a", "b", "z")))
    found = job.checks(led("abzcd", "a"), z={"c": "slow", "d": "slow"})  # z is at fault, perhaps
    assert isinstance(found, Checked)
    assert set(found.excluded) == {"c", "d"}
    assert job.next_entry(led("abz", "a")) is None


def test_a_check_that_no_neighbor_has_ended_with_a_host_does_not_count() -> None:
    job = Checking()
    job.checks(led("abc", "a"))
    job.apply(Start(0, ("a", "b", "c")), Check(0, "check/9", ("c", "d")))
    there = led("abd", "a", lost="c")
    reports = {"d": {"c": "the connection was lost"}}
    found = job.next_entry(there, dataclasses.replace(WRAPPED, checks=reports))
    assert found == Checked("check/9")
    job.apply(found)
    assert job.next_entry(there) is None  # not `Take`
    ready = dataclasses.replace(WRAPPED, ready=frozenset("abd"))
    assert isinstance(job.next_entry(there, ready), Check)


def test_a_host_that_comes_again_and_again_does_not_make_the_others_wait_forever() -> None:
    job = Checking()
    for now in (0.0, 300.0, 601.0):
        alone = led("a", "a").of(job.plan)
        found = job._decider.decide(alone, WRAPPED, now)
        assert isinstance(found, End) == (now > 600)
        there = led("abc", "a").of(job.plan)
        ready = dataclasses.replace(WRAPPED, ready=frozenset("abc"))
        assert isinstance(job._decider.decide(there, ready, now + 200), Check)


def test_a_spare_takes_a_place_once_it_was_checked_rather_with_another_spare() -> None:
    job = Checking()
    job.checks(led("abcd", "a"))
    job.apply(Start(0, ("a", "b", "c")))
    assert job.next_entry(led("abce", "a", lost="d")) is None
    assert job.next_entry(led("ace", "a", lost="bd")) is None  # e was not checked
    job = Checking()
    job.checks(led("abcd", "a"))
    job.apply(Start(0, ("a", "b", "c")))
    assert isinstance(job.checks(led("abcde", "a")), Checked)
    assert job.checked == ("d", "e")
    assert job.next_entry(led("ace", "a", lost="bd")) == Take(1, "e")


def test_a_suspicion_is_looked_into_while_a_check_runs() -> None:
    job, there = Checking(), led("abcd", "a")
    job.checks(led("abc", "a"))
    job.apply(Start(0, ("a", "b", "c")), Check(0, "check/9", ("c", "d")))
    suspects = dataclasses.replace(WRAPPED, suspicion="links/0")
    probe = job.next_entry(there, suspects)
    assert isinstance(probe, Probe)
    job.apply(probe)
    links: dict[str, list[str]] = {host: [] for host in "abcd"}
    assert job.next_entry(there, dataclasses.replace(suspects, links=links)) == Links(0, "links/0")
    assert job.plan.check is not None


def test_a_check_that_the_next_attempt_cuts_off_is_made_again() -> None:
    """The ranks of the next attempt need the accelerators."""
    job, there = Checking(), led("abcd", "a")
    job.checks(led("abc", "a"))
    started = Start(0, ("a", "b", "c")), Check(0, "check/9", ("c", "d"))
    job.apply(*started, Restart(0, "a fault"))
    assert job.plan.check is None  # its processes would be ended with the workers
    job.apply(Start(1, ("a", "b", "c")))
    assert (job.plan.check, job.plan.stage) == (None, Stage.RUNNING)
    ready = dataclasses.replace(WRAPPED, ready=frozenset("abcd"))
    assert job.next_entry(there, ready) == Check(1, f"check/{job.plan.number}", ("c", "d"))
    assert job.plan.apply(Checked("check/9")).checked == frozenset("abc")  # too late


@pytest.mark.slow
def test_two_hosts_make_an_all_reduce() -> None:
    with contextlib.closing(Pair()) as pair:
        pair.check()
        assert pair.reports() == {"a": {}, "b": {}}
        for host, other in zip(pair.hosts, "ba", strict=True):
            figures = host.take_figures()
            assert re.fullmatch(rf"all-reduce with {other} at \S+ \w?B/s \(cpu:1\)", figures)


@pytest.mark.slow
def test_a_neighbor_that_does_not_come_has_failed_in_time() -> None:
    with contextlib.closing(Pair(limit_s=3.0)) as pair:
        pair.check(only=1)
        late = "the all-reduce with a has not ended within 3 s (--health-timeout)"
        assert pair.reports(1) == {"b": {"a": late}}


@pytest.mark.slow
def test_a_check_that_is_cancelled_reports_nothing_and_the_next_one_begins_after_its_end() -> None:
    with contextlib.closing(Pair()) as pair:
        pair.check(only=0)
        first = pair.hosts[0]._run
        pair.check()
        assert pair.reports() == {"a": {}, "b": {}}
        assert first is not None
        assert (first.cancelled, first.over.is_set()) == (True, True)
        assert pair.own == []


def test_nothing_is_left_of_a_check_when_an_agent_closes() -> None:
    pair = Pair()
    pair.check(only=0)
    assert pair.own.begun.wait(NET_S)
    pair.close()
    assert pair.own == []  # it was reaped


def test_a_check_that_cannot_be_made_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(neighbors, "CheckProcess", refuse)
    with contextlib.closing(Pair()) as pair:
        pair.check()
        told = "the check could not be made: OSError('no more processes')"
        assert pair.reports() == {"a": {"b": told}, "b": {"a": told}}


@pytest.mark.slow
def test_a_process_that_dies_has_failed() -> None:
    with contextlib.closing(Pair()) as pair:
        pair.check(only=0)
        assert pair.own.begun.wait(NET_S)
        os.kill(pair.own[0], signal.SIGKILL)
        told = "the all-reduce with b: its process was killed by SIGKILL"
        assert pair.reports(0) == {"a": {"b": told}}
