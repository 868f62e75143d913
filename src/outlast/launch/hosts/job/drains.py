"""The decisions about hosts that are to leave a job: when their ranks move, and to which host.

A host that was told to leave goes on training until another one can take its place, or until it is
known that none will, and the job may go on without it. If too few hosts would be left, or all were
told within a second, as at the end of an allocation, the job stops: one joint save.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.coordination.job_record import JobState
from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts import plan as plans
from outlast.launch.hosts.job.waiting import NEEDED_S, SMALLER_S, Facts, Wait
from outlast.launch.hosts.places import nearness, ranks_text
from outlast.launch.hosts.plan import Entry, JobPlan, Leave
from outlast.system.units import duration_text

TOGETHER_S = 1.0
"""Hosts that are told by a signal within this time are told together."""


class Drains:
    """The rules, and since when this agent has seen that a host is to leave."""

    def __init__(self, limits: HostsSpec, nproc: int) -> None:
        self._limits, self._nproc = limits, nproc
        self._since: dict[Leave, float] = {}

    def decide(
        self, plan: JobPlan, facts: Facts, spares: Sequence[HostInfo], now: float
    ) -> Entry | Wait | None:
        """The next decision about the hosts that wait to leave, or what they wait for."""
        busy = set()  # hosts that are to have the ranks of another one, and do not have them yet
        for host in plan.moves:
            busy.add(to := plan.takes_over(host))
            if to in plan.lost and host in facts.unasked and not facts.job.stopping:
                return plans.Return(host)
        waiting = [each for each in plan.waiting_to_leave if each.host not in busy]
        self._since = {each: self._since.get(each, now) for each in waiting}
        staying = [host for host in plan.hosts if host not in plan.drains]
        told = [each for each in waiting if each.signal]
        if not waiting or facts.job.state not in (JobState.PLAIN, JobState.RUNNING):
            return None
        gone = {*plan.moves, *(host for host, each in plan.drains.items() if each.signal)}
        stay, left = plan.hosts.keys() - gone, len(plan.hosts.keys() & set(plan.places) - gone)
        if told and (len(stay) < self._limits.minimum or facts.job.state is JobState.PLAIN):
            return _stop(plan, told)
        if facts.job.state is JobState.PLAIN:
            return self._restart(plan, waiting, staying)
        if facts.job.stopping:
            return None
        newest = max((self._since[each] for each in told), default=now - TOGETHER_S)
        if now - newest < TOGETHER_S:
            what = "whether all hosts are told to leave"
            return Wait(what, newest + TOGETHER_S, "hosts leave")
        if {place for place, _ in plan.missing()} - plan.given_up:
            return None  # the next spare is for the place of a lost host
        limit_s = NEEDED_S
        for each in waiting:
            # Of several that were asked, each may leave that the job can do without.
            remain = left if each.signal else left - 1
            smaller = self._may_remain(remain, facts)
            limit_s = self._limits.replacement_s or (SMALLER_S if smaller else NEEDED_S)
            if each.host not in facts.there and (spares or smaller):
                continue  # its ranks are on their way, and would come after their successors
            if spares and self._limits.place < 0:
                leaves = plan.hosts[each.host]
                nearest = max(spares, key=lambda spare: nearness(leaves, spare))
                return plans.Move(each.host, nearest.id)
            if each.signal and not smaller:
                return _stop(plan, told)
            if each.signal or now - self._since[each] >= limit_s:
                if smaller:
                    return plans.Move(each.host)
                within = duration_text(limit_s)
                return plans.Stay(each.host, f"no other host has joined within {within}")
        first = waiting[0]  # none was told by a signal
        place = plan.place_of(first.host)
        assert place is not None
        name, which = plan.host(first.host).name, ranks_text(place, self._nproc)
        goes = self._may_remain(left - 1, facts)
        then = f"the job continues on {left - 1}" if goes else f"{name} stays"
        until = self._since[first] + limit_s
        return Wait(f"a host for {which} of {name}, which is to leave", until, then, at_once=True)

    def _may_remain(self, count: int, facts: Facts) -> bool:
        """Whether the job may go on with so many hosts."""
        return count >= self._limits.minimum and 0 <= facts.least <= count * self._nproc

    def _restart(
        self, plan: JobPlan, waiting: Sequence[Leave], staying: Sequence[str]
    ) -> Entry | None:
        """A job without `Wrapper` restarts without the host."""
        name = plan.host(waiting[0].host).name
        if len(staying) < self._limits.minimum:
            needs = f"--nnodes needs {self._limits.minimum} hosts"
            return plans.Stay(waiting[0].host, needs)
        text = f"host {name} leaves ({waiting[0].reason}): all workers restart without it"
        return plans.Restart(plan.attempt, text, counts=False)


def _stop(plan: JobPlan, told: Sequence[Leave]) -> Entry:
    return plans.Stop(told[-1].signal, plan.host(told[-1].host).name)
