"""What the agent of the leading host does for all: it looks at the reports, and decides; and what
all agents say about the hosts of the job, each thing once.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any

from outlast.clock import Clock
from outlast.coordination.job_record import JobState
from outlast.coordination.replicated.hosts import HostInfo
from outlast.errors import StoreError
from outlast.events.emitter import Emitter
from outlast.events.types import HostJoined, HostLeaving, HostLost
from outlast.launch.agent.coordinator import Outcome
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.hosts.host_group import GroupState
from outlast.launch.hosts.job.decider import Decider
from outlast.launch.hosts.job.fault_limit import FaultLimit
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.neighbors import unchecked
from outlast.launch.hosts.job.waiting import Facts, Wait
from outlast.launch.hosts.plan import Entry, JobPlan, Leave, Move, Return, Stage, Stay
from outlast.system.units import duration_text, listed

_LONG_S = 5.0
"""A wait is told after so long, and again after so long if it has changed."""


class WaitNotice:
    """Lines about what the job waits for: when a wait has lasted a while, and when it is over.
    `told` is whether a wait was told whose end was not.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: float | None = None
        self._last, self._last_at = "", 0.0
        self.told = False

    def waiting(self, wait: Wait | None, now: float) -> None:
        """Tell what the job waits for now; `None` for nothing."""
        if wait is None:
            if self.told and self._since is not None:
                self._say(f"the wait is over, after {duration_text(now - self._since)}")
            self.forget()
            return
        if self._since is None:
            self._since = self._last_at = now
        text = f"{wait.what}; {wait.then}"
        if text == self._last or (not wait.at_once and now - self._last_at < _LONG_S):
            return
        self._last, self._last_at, self.told = text, now, True
        until = "" if wait.until is None else f"; in {duration_text(wait.until - now)} {wait.then}"
        self._say(f"waiting for {wait.what}{until}")

    def forget(self) -> None:
        """Nothing is waited for any more, and nothing is to be said of it."""
        self._since, self.told, self._last = None, False, ""


class Leading:
    """The duties of the leader's agent. Every agent has one, since any of them may become the
    leader; only the leader's is asked. `say` prints a line.
    """

    def __init__(
        self,
        job: JobSpec,
        hosts: HostsSpec,
        log: JobLog,
        keys: JobKeys,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._nproc, self._log, self._keys, self._clock = job.nproc, log, keys, clock
        self._waits = WaitNotice(say)
        self._given_up: frozenset[int] = frozenset()
        self._ends = False
        self._checks = job.health is not None and job.health.checks_neighbors
        restarts = job.max_restarts or 0
        self._decider = Decider(hosts, job.nproc, restarts, checks=self._checks)
        self._fault_limit = FaultLimit(hosts, keys)
        self._told: set[tuple[int, str]] = set()  # what the members were told in an attempt

    def waits(self, plan: JobPlan) -> bool:
        """Whether the job may wait for hosts, so that every agent has to look."""
        missing = {place for place, _ in plan.missing()}
        return self._waits.told or (
            bool(missing - plan.given_up or plan.waiting_to_leave)
            if plan.running
            else plan.stage is not Stage.FINISHED
        )

    def next_entry(self, plan: JobPlan, leader: str, *, leads: bool) -> Entry | None:
        """The next decision, after the members of the wrapped call have been told what has become
        of the others; `None` for an agent that does not lead. Such an agent only says what the job
        waits for. It counts the time all the same, as it may have to lead in the middle of a wait.
        """
        now = self._clock.now()
        self._cut_off(plan)
        self._fault_limit.note(plan, now)
        if plan.stage is Stage.FINISHED:  # nothing is read: the leader may have left
            self._waits.waiting(None, now)
            return None
        if not leads and not self.waits(plan):
            self._waits.forget()  # the next wait has a time of its own
            return None
        reads = self._repairs(plan) or (plan.running and self._fault_limit.on)
        job = self._keys.job() if reads else JobRecord()
        if leads:
            self._tell_members(plan, job)
        facts = self._facts(plan, job, leader)
        unfit = self._fault_limit.next_entry(plan, job, now) if leads else None
        found = unfit or self._decider.decide(plan, facts, now)
        if found is None or isinstance(found, Wait):
            self._waits.waiting(found, now)
            return None
        return found if leads else None

    def _cut_off(self, plan: JobPlan) -> None:
        """A wait for hosts that was given up is not over, nor one that the end of the job cuts off:
        what has followed is said elsewhere.
        """
        if plan.given_up - self._given_up or (plan.ends and not self._ends):
            self._waits.forget()
        self._given_up, self._ends = plan.given_up, plan.ends

    def _repairs(self, plan: JobPlan) -> bool:
        spares = any(host not in plan.places for host in plan.hosts)
        return plan.running and (spares or bool(plan.missing() or plan.waiting_to_leave))

    def _facts(self, plan: JobPlan, job: JobRecord, leader: str) -> Facts:
        """What the next decision depends on. Nothing is read that it does not depend on."""
        check, ready = plan.check, frozenset[str]()
        if self._checks and check is None and unchecked(plan):
            ready = frozenset(self._log.ports("check"))
        checks = {} if check is None else self._log.links(check.attempt, check.key)
        if plan.stage is Stage.FORMING:
            return Facts(checks=checks, ready=ready, leader=leader)
        clears = plan.stage is Stage.CLEARING
        suspicion = self._keys.suspected_link() if plan.running else ""
        probe = plan.probe
        return Facts(
            job=job,
            size=self._keys.size(job) if plan.missing() else None,
            cleared=self._log.cleared(plan.attempt) if clears else frozenset(),
            done=self._log.done(plan.attempt),
            used=self._log.used(plan) - plan.used if clears or self._repairs(plan) else 0,
            suspicion=suspicion,
            links={} if probe is None else self._log.links(probe.attempt, probe.key),
            checks=checks,
            ready=ready,
            leader=leader,
            least=self._keys.least(job) if plan.waiting_to_leave else -1,
            unasked={
                host
                for host, place in plan.moves.items()
                if plan.takes_over(host) in plan.lost
                and self._keys.trains(job, host, self._ranks(place))
            },
            there={
                each.host
                for each in plan.waiting_to_leave
                if (place := plan.place_of(each.host)) is not None
                and self._keys.has_ranks(job, each.host, self._ranks(place))
            },
        )

    def _tell_members(self, plan: JobPlan, job: JobRecord) -> None:
        """Tell the members of the wrapped call what the plan says that concerns them: which hosts
        are lost, which ends their iteration; which of the places stay empty; and that a probe of
        the links is over.

        Each agent that leads begins with all of it, because the one before may have died in the
        middle: to be told twice changes nothing.
        """
        if not plan.running:
            return
        keys, size = self._keys, plan.size * self._nproc
        moved = [
            (place, loss) for host, place in plan.moves.items() if (loss := plan.lost.get(host))
        ]
        lost = [*plan.missing(), *moved]
        for place, loss in lost if job.state is not JobState.PLAIN else ():
            if self._is_new(plan, f"lost {loss.host.id} in {job.prefix}"):
                ranks, host = self._ranks(place), loss.host
                keys.ended(job, host.id, ranks, size, str(loss), host.name)
        for place in plan.given_up:
            if self._is_new(plan, f"given up {plan.places[place]}"):
                keys.give_up(frozenset(self._ranks(place)))
        # Once the hosts that leave are lost: a rank that connects to one cannot be interrupted.
        probed = plan.probed and plan.probe is None and not plan.excluded.keys() & plan.hosts.keys()
        if probed and self._is_new(plan, f"probed {plan.probed}"):
            keys.end_probe(plan.probed)

    def _is_new(self, plan: JobPlan, what: str) -> bool:
        """Whether the members were not told yet. An error of the store ends this agent."""
        new = (plan.attempt, what) not in self._told
        self._told.add((plan.attempt, what))
        return new

    def _ranks(self, place: int) -> range:
        return range(place * self._nproc, (place + 1) * self._nproc)


class GroupNotices:
    """Lines and events about hosts that join, are lost, or lead."""

    def __init__(self, say: Callable[[str], None], emitter: Emitter) -> None:
        self._say, self._emitter = say, emitter
        self._joined: set[str] = set()
        self._lost = 0
        self._refused = 0
        self._leader = ""

    def changed(self, plan: JobPlan, group: GroupState) -> None:
        first = not self._joined
        losses = list(plan.lost.values())
        came = [host for host in plan.hosts.values() if host.id not in self._joined]
        came += [loss.host for loss in losses if loss.host.id not in self._joined]
        if came:
            # When this host joins, others may be gone already: only the events tell of those.
            told = [host for host in came if host.id in plan.hosts] if first else came
            self._joined.update(host.id for host in came)
            self._say(f"joined: {listed(told, 8)}; hosts in the job: {len(plan.hosts)}")
        for host in came:
            self._emitter.emit(HostJoined(**_named(host)))
        for loss in losses[self._lost :]:
            if not first:
                self._say(str(loss))
            lost = HostLost(**_named(loss.host), reason=loss.reason, left=loss.left)
            self._emitter.emit(lost)
        self._lost = len(losses)
        for line in group.refused[self._refused :]:
            self._say(line)
        self._refused = len(group.refused)
        if group.leader != self._leader and group.leader in plan.hosts:
            self._leader = group.leader
            self._say(f"{plan.hosts[group.leader].name} leads the hosts (term {group.term})")


def _named(host: HostInfo) -> dict[str, Any]:
    return {"host_id": host.id, "name": host.name, "address": host.address}


def leaving_event(entry: Leave | Stay | Move | Return, plan: JobPlan) -> HostLeaving:
    """The event about a host that is to leave, or that stays."""
    host, is_move = plan.host(entry.host), isinstance(entry, Move)
    to = plan.host(entry.to).name if isinstance(entry, Move) and entry.to else ""
    return HostLeaving(
        **_named(host),
        reason=entry.reason if isinstance(entry, Leave | Stay) else plan.drains[host.id].reason,
        to=to or ("nobody" if is_move else ""),
        stays=isinstance(entry, Stay),
    )


def outcome_of(
    plan: JobPlan, log: JobLog, keys: JobKeys, say: Callable[[str], None], *, joined_late: bool
) -> Outcome:
    """What all hosts know at the end of the job."""
    end = plan.end
    failures: Sequence[Death] | None
    try:
        job = keys.ended_job()
        if end is not None and end.process and not job.reporter:
            job = dataclasses.replace(job, reporter=end.process)
        failures, codes = log.failures(), log.exit_codes(plan.attempt)
    except StoreError as e:  # the job is over; this host ends with what it knows itself
        say(f"the results of the other hosts are not known here: {e}")
        job, failures, codes = JobRecord(), None, frozenset()
    return Outcome(
        job=job,
        received=None if plan.stop is None else signal.Signals(plan.stop.signal),
        failures=failures,
        cause="" if end is None else end.cause,
        codes=codes,
        joined_late=joined_late,
        links=tuple(dict.fromkeys(plan.excluded.values())),
    )
