"""What the agents say about the waits of a job on many hosts, without hosts."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

from fake_clock import FakeClock
from launch.hosts.test_decider import Hosts, group, running
from outlast.coordination.records import SizeRecord
from outlast.coordination.stores.store import MemoryStore
from outlast.launch.agent.job_keys import JOB_KEY, JobKeys
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.leading import Leading
from outlast.launch.hosts.plan import End, Entry, Finish, GiveUp, JobPlan, Start, Stop, Take

NEEDS_TWO = SizeRecord(ranks=2, least=2)
OVER = "the wait is over, after "


class Agent:
    """One agent's part, its clock, and what it has said."""

    def __init__(self, *, leads: bool) -> None:
        self.said: list[str] = []
        self.clock, self.leads, self.store = FakeClock(), leads, MemoryStore()
        hosts = HostsSpec(minimum=2, maximum=3, backend="c10d", endpoints=(("a", 1),))
        job: Any = SimpleNamespace(nproc=1, max_restarts=None)
        store: Any = self.store  # its keys are not forgotten
        log = JobLog(store, "a", "a")
        keys = JobKeys(self.store)
        self.leading = Leading(job, hosts, log, keys, self.clock, self.said.append)

    def looks(self, plan: JobPlan, there: Hosts, after_s: float = 0.0) -> Entry | None:
        self.clock.advance(after_s)
        return self.leading.next_entry(there.of(plan), "", leads=self.leads)

    def holds(self, size: SizeRecord) -> None:
        """The members of a call hold a restart."""
        self.store.put(JOB_KEY, b'{"call": 0, "state": "running", "prefix": "call/"}')
        self.store.put("call/size", json.dumps(dataclasses.asdict(size)).encode())


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
