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
from outlast.launch.hosts.job.decider import Decider, Facts, Limits, loss_text
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.job_plan import Entry, JobPlan, Stage
from outlast.launch.hosts.job.placements import ranks_text
from outlast.system.units import duration_text


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
        self._say, self._replacement_s = say, hosts.replacement_s
        self._decider = Decider(
            Limits(
                minimum=hosts.minimum,
                maximum=hosts.maximum,
                max_restarts=job.max_restarts or 0,
                last_call_s=hosts.last_call_s,
                join_s=hosts.join_s,
                replacement_s=hosts.replacement_s,
                asked=hosts.place >= 0,
            )
        )
        self._reported: set[tuple[int, str]] = set()
        self._probe_reported = (-1, "")

    def next_entry(self, plan: JobPlan, group: GroupState) -> Entry | None:
        """The next decision, after the members of the wrapped call have been told which hosts are
        lost.
        """
        facts = self._facts(plan, group)
        self._report_lost_hosts(plan, group, facts.job)
        self._report_probe(plan, group)
        return self._decider.next_entry(plan, group, facts, self._clock.now())

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
        return Facts(
            job=self._keys.job() if repairs else JobRecord(),
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
            spare = any(host.id not in plan.places for host in group.hosts)
            if job.state is JobState.RUNNING and not job.stopping and not spare:
                limit = duration_text(self._replacement_s)
                self._say(
                    f"{ranks_text(place, self._nproc)}: waiting for another host, for at most "
                    f"{limit} (--replacement-timeout)"
                )
