"""What the agents say about the waits of a job on many hosts, without hosts."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from launch.hosts.test_decider import Hosts, group, running
from outlast.coordination.deciding import GONE
from outlast.coordination.job_record import JobState
from outlast.coordination.membership import RESTART, MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import SizeRecord
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import StoreError
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.agent.job_keys import JOB_KEY, JobKeys
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts.host_entries import Links, Probe
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.leading import Leading
from outlast.launch.hosts.plan import End, Entry, Finish, GiveUp, JobPlan, Start, Stop, Take

NEEDS_TWO = SizeRecord(ranks=2, least=2)
OVER = "the wait is over, after "


class Agent:
    """One agent's part, its clock, and what it has said."""

    def __init__(self, *, leads: bool, store: MemoryStore | None = None) -> None:
        self.said: list[str] = []
        self.clock, self.leads, self.store = FakeClock(), leads, store or MemoryStore()
        hosts = HostsSpec(minimum=2, maximum=3, backend="c10d", endpoints=(("a", 1),))
        job: Any = SimpleNamespace(nproc=1, max_restarts=None, health=None)
        store: Any = self.store  # its keys are not forgotten
        log = JobLog(store, "a", "a")
        keys = JobKeys(self.store)
        self.leading = Leading(job, hosts, log, keys, self.clock, self.said.append)

    def looks(self, plan: JobPlan, there: Hosts, after_s: float = 0.0) -> Entry | None:
        self.clock.advance(after_s)
        return self.leading.next_entry(there.of(plan), "", leads=self.leads)

    def holds(self, size: SizeRecord) -> None:
        """The members of a call hold a restart."""
        self.calls("call/")
        self.store.put("call/size", json.dumps(dataclasses.asdict(size)).encode())

    def calls(self, prefix: str) -> None:
        """The members have begun a call."""
        record = {"call": 0, "state": "running", "prefix": prefix}
        self.store.put(JOB_KEY, json.dumps(record).encode())

    def lost_in(self, prefix: str) -> list[int]:
        """The members of a call that are in its ledger."""
        ledger = MembershipProtocol(Link(prefix), 3).ledger()
        return [record.member for record in drive(ledger, perform_on(self.store))]

    def over(self, prefix: str) -> bytes | None:
        """How the first iteration of a call has ended."""
        return drive(MembershipProtocol(Link(prefix), 3).over(0), perform_on(self.store))

    def given_up(self) -> frozenset[int]:
        return drive(MembershipProtocol(Link(), 3).given_up(), perform_on(self.store))


class LostInTheMiddle(MemoryStore):
    """Another store, for an agent that is lost before it appends anything."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self.table = store.table

    def append(self, key: str, value: bytes) -> None:
        raise StoreError("this host is lost")


def test_each_wait_has_a_time_of_its_own() -> None:
    """An agent that does not lead had counted its wait for the workers' end from the first wait for
    hosts on, of which it had said nothing, because its job had started soon.
    """
    agent = Agent(leads=False)
    agent.looks(JobPlan(), group("ab"))
    agent.looks(running("abc"), group("abc"), 1.0)
    ending = running("abc", Stop(15, "a"))
    agent.looks(ending, group("abc"), 20.0)
    assert agent.said == []
    agent.looks(ending, group("abc"), 6.0)
    agent.looks(finished(ending), group("abc"), 1.0)
    assert agent.said == ["waiting for the workers of a, b, c to end", f"{OVER}7.00 s"]


def finished(plan: JobPlan) -> JobPlan:
    return plan.apply(Finish())


def test_a_wait_that_was_given_up_is_not_over() -> None:
    agent = Agent(leads=True)
    agent.holds(NEEDS_TWO)
    plan, there = running("abc"), group("ab", lost="c")
    assert agent.looks(plan, there) is None
    given_up = agent.looks(plan, there, 1.0)
    assert given_up == GiveUp((2,))
    waits = "waiting for a host for rank 2; in 1.00 s the job continues on 2"
    agent.looks(plan.apply(given_up), there)
    assert agent.said == [waits]


def test_a_wait_for_a_host_that_came_is_over() -> None:
    agent = Agent(leads=True)
    agent.holds(NEEDS_TWO)
    plan = running("abc")
    agent.looks(plan, group("ab", lost="c"))
    there = group("abd", lost="c")
    taken = agent.looks(plan, there, 0.5)
    assert taken == Take(2, "d")
    agent.looks(plan.apply(taken), there)
    assert agent.said[1:] == [f"{OVER}500.0 ms"]


def test_a_wait_that_the_end_of_the_job_cuts_off_is_not_over() -> None:
    agent = Agent(leads=True)
    agent.looks(JobPlan(), group("a"))
    agent.looks(JobPlan(), group("a"), 6.0)
    ended = agent.looks(JobPlan(), group("a"), 600.0)
    assert isinstance(ended, End)
    plan = JobPlan().apply(ended)
    agent.looks(finished(plan), group("a"))
    assert len(agent.said) == 1
    assert agent.said[0].startswith("waiting for 2 hosts (--nnodes)")

    agent = Agent(leads=True)
    agent.holds(NEEDS_TWO)
    plan, there = running("abc"), group("ab", lost="c")
    agent.looks(plan, there)
    plan = plan.apply(Stop(15, "a"))
    agent.looks(plan, there, 0.5)
    agent.looks(plan, there, 6.0)
    agent.looks(finished(plan), there, 1.0)
    assert agent.said[1:] == ["waiting for the workers of a, b to end", f"{OVER}7.00 s"]


def test_a_wait_for_the_first_hosts_is_over_when_the_job_starts() -> None:
    agent = Agent(leads=True)
    agent.looks(JobPlan(), group("a"))
    agent.looks(JobPlan(), group("a"), 6.0)
    assert agent.looks(JobPlan(), group("abc"), 1.0) == Start(0, ("a", "b", "c"))
    agent.looks(running("abc"), group("abc"))
    assert agent.said[1:] == [f"{OVER}7.00 s"]


def test_the_loss_of_a_host_ends_the_iteration_of_each_call_that_begins() -> None:
    agent = Agent(leads=True)
    plan, there = running("abc"), group("ab", lost="c")
    for prefix in ("first/", "second/"):
        agent.calls(prefix)
        agent.looks(plan, there)
        assert (agent.lost_in(prefix), agent.over(prefix)) == ([2], RESTART)
    other = Agent(leads=False, store=agent.store)
    other.calls("third/")
    other.looks(plan, there)
    assert (other.lost_in("third/"), other.over("third/")) == ([], None)


def test_a_new_leader_tells_the_members_all_that_the_one_before_may_have_left_out() -> None:
    first = Agent(leads=True)
    first.calls("call/")
    plan, there = running("abc", GiveUp((2,))), group("ab", lost="c")
    second = Agent(leads=True, store=first.store)
    second.looks(plan, there)
    assert (second.lost_in("call/"), second.given_up()) == ([2], {2})
    log = second.store.read(GONE)
    second.looks(plan, there)
    assert second.store.read(GONE) == log  # each agent tells it once
    first.looks(plan, there)
    assert (first.lost_in("call/"), first.given_up()) == ([2], {2})


def test_a_place_that_is_given_up_again_is_told_again() -> None:
    agent = Agent(leads=True)
    agent.calls("call/")
    plan = running("abc", GiveUp((2,)))
    agent.looks(plan, group("ab", lost="c"))
    drive(MembershipProtocol(Link(), 3).take_back(frozenset({2})), perform_on(agent.store))
    plan = plan.apply(Take(2, "d")).apply(GiveUp((2,)))
    agent.looks(plan, group("ab", lost="cd"))
    assert agent.given_up() == {2}


def test_a_probe_is_over_once_the_host_that_leaves_is_lost() -> None:
    agent = Agent(leads=True)
    agent.calls("call/")
    key = "call/links/0"
    plan = running("abc", Probe(0, key, tuple("abc")), Links(0, key, {"c": "no link"}, {"c": []}))
    agent.looks(plan, group("abc"))
    assert agent.store.read(key) is None
    agent.looks(plan, group("ab", lost="c"))
    assert agent.store.read(key) == b"1"
    assert agent.lost_in("call/") == [2]


def test_a_worker_that_ended_early_is_lost_with_the_host_whose_agent_was_about_to_say_so() -> None:
    agent = Agent(leads=True)
    agent.calls("call/")
    job = JobRecord(JobState.RUNNING, prefix="call/")
    dying: Any = LostInTheMiddle(agent.store)
    with pytest.raises(StoreError):
        JobKeys(dying).will_not_come(job, "c", 100, 2, 3, "process 100 exited with code 3")
    agent.looks(running("abc"), group("ab", lost="c"))
    assert (agent.lost_in("call/"), agent.over("call/")) == ([2], RESTART)
