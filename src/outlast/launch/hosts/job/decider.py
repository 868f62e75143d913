"""The decisions for a job on many hosts: rules without input and output.

The agent of the group's leader asks `Decider.decide` when something has changed, and from time
to time, and claims the entry. Two agents that both take themselves for the leader do no harm: they
claim the same number of the chain, and the second learns what was decided.
"""

from __future__ import annotations

from outlast.coordination.job_record import JobState
from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts import plan as plans
from outlast.launch.hosts.host_entries import Probe
from outlast.launch.hosts.job.drains import Drains
from outlast.launch.hosts.job.links import judge
from outlast.launch.hosts.job.neighbors import next_check
from outlast.launch.hosts.job.waiting import NEEDED_S, SMALLER_S, Facts, Wait
from outlast.launch.hosts.places import PlaceConflict, assign, nearness, ranks_text, sort_key
from outlast.launch.hosts.plan import Entry, JobPlan, LostHost, Stage
from outlast.system.units import duration_text, listed


class Decider:
    """The rules, and since when this agent has seen what they wait for.

    Args:
        max_restarts: of all workers, in a job that does not use `Wrapper`.
        checks: whether hosts are checked with a neighbor before they run ranks.
    """

    def __init__(
        self, limits: HostsSpec, nproc: int, max_restarts: int, *, checks: bool = False
    ) -> None:
        self._limits, self._nproc, self._max_restarts = limits, nproc, max_restarts
        self._checks = checks
        self._asked = limits.place >= 0  # each host has the place that it asks for
        self._since: dict[str, float] = {}
        self._drains = Drains(limits, nproc)

    def decide(self, plan: JobPlan, facts: Facts, now: float) -> Entry | Wait | None:
        """The next decision, or what the job waits for; `None` if there is neither now."""
        clearing = plan.stage is Stage.CLEARING
        present = [host for host in plan.places if host in plan.hosts]
        ended = facts.done | facts.cleared if clearing else facts.done
        busy = [host for host in present if host not in ended]
        if busy and (clearing or plan.stage is Stage.ENDING):
            names = ", ".join(plan.hosts[host].name for host in busy[:8])
            return Wait(f"the workers of {names} to end")
        if plan.stage is Stage.ENDING:
            return plans.Finish()
        if plan.stage in (Stage.FORMING, Stage.CLEARING):
            return self._start(plan, facts, now)
        if plan.running:
            self._forget("few", "enough")
            if present and not busy:
                return plans.Finish()
            check = self._check(plan, facts) if self._checks else None
            return self._links(plan, facts) or check or self._repair(plan, facts, now)
        return None

    def _start(self, plan: JobPlan, facts: Facts, now: float) -> Entry | Wait | None:
        out = {*plan.leaving, *plan.drains}
        hosts = [host for host in plan.hosts.values() if host.id not in out]
        limits, count = self._limits, len(hosts)
        came = f"{count} joined: {', '.join([host.name for host in hosts][:8])}"
        checking = None
        if plan.check is not None:
            checking = Wait("the check of hosts with their neighbors (--health-check full)")
        if count < limits.minimum:
            self._forget("enough")
            waited_s = self._seconds("few", now)
            if waited_s < limits.join_s:
                wanted = f"{limits.minimum} hosts (--nnodes), {came}"
                return checking or Wait(wanted, now + limits.join_s - waited_s, "the job ends")
            waited = duration_text(limits.join_s)
            return plans.End(
                f"waited {waited} for {limits.minimum} hosts (--nnodes): "
                f"only {count} joined: {listed(hosts, count)}"
            )
        if not self._checks:  # one that is thrown out comes again and again
            self._forget("few")
        enough_s, last_call_s = self._seconds("enough", now), self._last_call_s(plan)
        more = limits.maximum - count
        wanted = f"{'1 more host' if more == 1 else f'up to {more} more hosts'} (--nnodes), {came}"
        wait = checking or Wait(wanted, now + last_call_s - enough_s, f"the job runs on {count}")
        if more > 0 and enough_s < last_call_s:
            return wait
        if self._checks and count > 1:
            fit = [host for host in hosts if host.id in plan.checked]
            if len(fit) < min(count, limits.maximum):
                return self._check(plan, facts) or wait
            hosts = fit
        try:
            places = assign(plan.places, hosts, limits.maximum, asked=self._asked)
        except PlaceConflict as e:
            return plans.End(str(e))
        self._since.clear()
        counts = plan.restart is not None and plan.restart.counts
        used = plan.used + facts.used + counts
        return plans.Start(plan.attempt + 1, places, used, self._nproc)

    def _check(self, plan: JobPlan, facts: Facts) -> Entry | None:
        return next_check(plan, facts.leader, facts.ready, facts.checks)

    def _links(self, plan: JobPlan, facts: Facts) -> Entry | None:
        if plan.probe is not None:
            return judge(plan.probe, plan, facts.leader, facts.links)
        if facts.suspicion in ("", plan.probed):
            return None
        hosts = tuple(host for host in plan.hosts if host not in plan.leaving)
        return Probe(plan.attempt, facts.suspicion, hosts)

    def _repair(self, plan: JobPlan, facts: Facts, now: float) -> Entry | Wait | None:
        """Bring a running attempt back to full size, or end it."""
        missing, least = plan.missing(), self._limits.minimum
        out = {*plan.places, *plan.leaving, *plan.drains}
        spares = [
            host
            for host in sorted(plan.hosts.values(), key=sort_key)
            if host.id not in out and (host.id in plan.checked or not self._checks)
        ]
        drain = self._drains.decide(plan, facts, spares, now)
        if drain is not None and not isinstance(drain, Wait):
            return drain
        if facts.job.state is JobState.PLAIN:
            return self._restart(plan, missing, spares, facts)
        if facts.job.state is not JobState.RUNNING or facts.job.stopping:
            return None  # the members leave by themselves
        fits = [
            (nearness(loss.host, spare), plans.Take(place, spare.id))
            for place, loss in missing
            for spare in spares
            if not self._asked or spare.place == place
        ]
        if fits:  # the host that was there before, or else the nearest one
            return max(fits, key=lambda fit: fit[0])[1]
        if spares and len(plan.places) < self._limits.maximum:
            return plans.Take(len(plan.places), spares[0].id)
        empty = [
            (place, loss, self._seconds(f"lost {loss.host.id}", now))
            for place, loss in missing
            if place not in plan.given_up
        ]
        limit_s, left = self._replacement_s(plan, missing, facts), len(plan.places) - len(missing)
        late = [(place, loss) for place, loss, waited_s in empty if waited_s >= limit_s]
        if late and left >= least:
            return plans.GiveUp(tuple(place for place, _ in late))
        if late:
            loss, waited = late[0][1], duration_text(limit_s)
            return plans.End(
                f"{loss}; no other host has joined within {waited}, "
                f"and --nnodes needs {least}: {left} left"
            )
        # A job that is told its limit, or has told what it allows, does not change its mind.
        known = facts.size is not None or self._limits.replacement_s is not None
        if not empty or not known:  # no restart was held so far: the members go on without them
            return drain
        if left < least:
            then = f"the job ends, as --nnodes needs {least} hosts and {left} left"
        elif self._may_shrink(plan, missing, facts):
            then = f"the job continues on {left}"
        elif facts.size is None or facts.size.least < 0:
            then = f"the job continues on {left}, if the program allows it, which is not known yet"
        else:
            then = f"the job ends, as the program needs {facts.size.least} ranks (min_ranks)"
        ranks = ", ".join(ranks_text(place, self._nproc) for place, *_ in empty)
        until = now + limit_s - max(waited_s for *_, waited_s in empty)
        return Wait(f"a host for {ranks}", until, then, at_once=True)

    def _restart(
        self,
        plan: JobPlan,
        missing: list[tuple[int, LostHost]],
        spares: list[HostInfo],
        facts: Facts,
    ) -> Entry | None:
        if missing:
            cause = str(missing[0][1])
            used, limit = plan.used + facts.used, self._max_restarts
            if used < limit:
                return plans.Restart(plan.attempt, f"{cause}: restart {used + 1} of {limit}")
            return plans.End(f"{cause}, and no restart is left (--max-restarts {limit})")
        if spares and len(plan.places) < self._limits.maximum and not facts.done:
            text = f"host {spares[0].name} ({spares[0].address}) has joined: all workers restart"
            return plans.Restart(plan.attempt, text, counts=False)
        return None

    def _last_call_s(self, plan: JobPlan) -> float:
        """How long to wait for more hosts than the minimum. A plain job that restarts does not wait
        long: a host that joins later restarts it again, for nothing.
        """
        if plan.stage is Stage.FORMING:
            return self._limits.last_call_s
        if self._limits.replacement_s is not None:
            return self._limits.replacement_s
        return min(self._limits.last_call_s, SMALLER_S)

    def _replacement_s(
        self, plan: JobPlan, missing: list[tuple[int, LostHost]], facts: Facts
    ) -> float:
        if self._limits.replacement_s is not None:
            return self._limits.replacement_s
        if not self._may_shrink(plan, missing, facts):
            return NEEDED_S
        return max(SMALLER_S, 0.0 if facts.size is None else facts.size.wait_s)

    def _may_shrink(self, plan: JobPlan, missing: list[tuple[int, LostHost]], facts: Facts) -> bool:
        """Whether the job may continue with the hosts that are left: `--nnodes` and the program
        both allow it. Until the program has said so, it may not.
        """
        left, size = len(plan.places) - len(missing), facts.size
        if left < self._limits.minimum or size is None or size.least < 0:
            return False
        # The members may not know yet that another host is lost.
        return min(size.ranks, left * self._nproc) >= size.least

    def _seconds(self, what: str, now: float) -> float:
        return now - self._since.setdefault(what, now)

    def _forget(self, *names: str) -> None:
        for name in names:
            self._since.pop(name, None)
