"""What the agent of the leading host does for all: it looks at the reports, and decides."""

from __future__ import annotations

from collections.abc import Callable

from outlast.clock import Clock
from outlast.coordination.records import FaultRecord
from outlast.launch.agent.decisions import JobRecord, JobState
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.hosts.host_group import GroupState
from outlast.launch.hosts.job.decider import Decider, Facts, loss_text
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.job_plan import Entry, JobPlan, Stage
from outlast.launch.hosts.job.notices import WaitNotice


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
        self._decider = Decider(hosts, job.nproc, job.max_restarts or 0)
        self._reported: set[tuple[int, str]] = set()
        self._probe_reported = (-1, "")

    def waits(self, plan: JobPlan, group: GroupState) -> bool:
        """Whether the job may wait for hosts, so that every agent has to look."""
        missing = {place for place, _ in self._decider.missing(plan, group)}
        return self._waits.said or (
            bool(missing - plan.given_up)
            if plan.stage is Stage.RUNNING
            else plan.stage is not Stage.FINISHED
        )

    def next_entry(self, plan: JobPlan, group: GroupState, *, leads: bool) -> Entry | None:
        """The next decision, after the members of the wrapped call have been told which hosts are
        lost; `None` for an agent that does not lead. Such an agent only says what the job waits
        for. It counts the time all the same, as it may have to lead in the middle of a wait.
        """
        now = self._clock.now()
        self._cut_off(plan)
        if plan.stage is Stage.FINISHED:  # nothing is read: the leader may have left
            self._waits.waiting(None, now)
            return None
        if not leads and not self.waits(plan, group):
            self._waits.forget()  # the next wait has a time of its own
            return None
        facts = self._facts(plan, group)
        if leads:
            self._report_lost_hosts(plan, group, facts.job)
            self._report_probe(plan, group)
        entry = self._decider.next_entry(plan, group, facts, now)
        if entry is None:
            self._waits.waiting(self._decider.wait(plan, group, facts, now), now)
        return entry if leads else None

    def _cut_off(self, plan: JobPlan) -> None:
        """A wait for hosts that was given up is not over, nor one that the end of the job cuts off:
        what has followed is said elsewhere.
        """
        ends = plan.stage in (Stage.ENDING, Stage.FINISHED)
        if plan.given_up - self._given_up or (ends and not self._ends):
            self._waits.forget()
        self._given_up, self._ends = plan.given_up, ends

    def _facts(self, plan: JobPlan, group: GroupState) -> Facts:
        """What the next decision depends on. Nothing is read that it does not depend on."""
        if plan.stage is Stage.FORMING:
            return Facts()
        spares = any(host.id not in plan.places for host in group.hosts)
        missing = bool(self._decider.missing(plan, group))
        repairs = plan.stage is Stage.RUNNING and (spares or missing)
        clears = plan.stage is Stage.CLEARING
        suspicion = self._keys.suspected_link() if plan.stage is Stage.RUNNING else ""
        probe = plan.probe
        job = self._keys.job() if repairs else JobRecord()
        return Facts(
            job=job,
            size=self._keys.size(job) if missing else None,
            cleared=self._log.cleared(plan.attempt) if clears else frozenset(),
            done=self._log.done(plan.attempt),
            used=self._log.replaced(plan.attempt) if clears or repairs else 0,
            suspicion=suspicion,
            links={} if probe is None else self._log.links(probe.attempt, probe.key),
        )

    def _report_probe(self, plan: JobPlan, group: GroupState) -> None:
        """Let the members that wait for the result of a probe go on: once the hosts that leave are
        lost and reported, because a rank that connects to one of them cannot be interrupted.
        """
        done = plan.stage is Stage.RUNNING and plan.probe is None and plan.probed
        if not done or any(host.id in plan.excluded for host in group.hosts):
            return
        if self._probe_reported != (plan.attempt, plan.probed):
            self._keys.end_probe(plan.probed)
            self._probe_reported = plan.attempt, plan.probed

    def _report_lost_hosts(self, plan: JobPlan, group: GroupState, job: JobRecord) -> None:
        """Tell the members of the wrapped call which hosts are lost, with all their ranks. It may
        be told twice, because another leader may have died before it did, or in the middle.
        """
        if plan.stage is not Stage.RUNNING or job.state is JobState.PLAIN:
            return
        for place, loss in self._decider.missing(plan, group):
            known = (plan.attempt, loss.host.id)
            if known in self._reported:
                continue
            ranks = range(place * self._nproc, (place + 1) * self._nproc)
            fault = FaultRecord(
                iteration=0,
                member=-1,
                rank=ranks[0],
                host=loss.host.name,
                pid=-1,
                interruption="TERMINATED",
                cause=loss_text(loss),
            )
            self._keys.host_lost(loss.host.id, ranks, plan.size * self._nproc, fault)
            self._reported.add(known)
