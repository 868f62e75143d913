"""Hosts whose ranks fail too often (`--max-host-faults`): they get no more ranks.

A fault of a host is a restart whose first cause was a rank of it. The leader's agent finds it in
the decisions of the ranks, or in the entry of a restart of all workers, and each fault is an entry
of the chain (`Blame`), so that it is counted once, and the next leader knows of it. When there are
too many, the leader claims `Unfit`: the host ends its workers and leaves, and to the others it is a
lost host. If it comes back while its faults count, it is told to leave again.

Not counted are mistakes in the program, which fail on any host; exceptions that may be the echo of
another rank's fault; and the loss of a host, which has left the job already.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator

from outlast.coordination.job_record import JobState
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts.host_entries import Blame, Unfit
from outlast.launch.hosts.plan import Entry, JobPlan


class FaultLimit:
    """The faults of the hosts, and when this agent has learned of each. Every agent has one, since
    any of them may become the leader.
    """

    def __init__(self, limits: HostsSpec, keys: JobKeys) -> None:
        self._limit, self._window_s, self._keys = limits.max_faults, limits.fault_window_s, keys
        self._seen: list[float] | None = None
        self._read = "", 0  # the call, and how many of its decisions were read

    @property
    def on(self) -> bool:
        return self._limit > 0

    def note(self, plan: JobPlan, now: float) -> None:
        """Note the time of new faults. That of the faults before this host joined is not known:
        they count only if all faults do.
        """
        if self._seen is None:
            self._seen = [-math.inf] * len(plan.blames)
        self._seen += [now] * (len(plan.blames) - len(self._seen))

    def next_entry(self, plan: JobPlan, job: JobRecord, now: float) -> Entry | None:
        over = job.stopping or job.state in (JobState.COMPLETED, JobState.ABORTED)
        if not self._limit or plan.ends or (plan.running and over):
            return None
        new = self._new_faults(plan, job) if plan.running else iter(())
        return next(new, None) or self._unfit(plan, now)

    def _new_faults(self, plan: JobPlan, job: JobRecord) -> Iterator[Entry]:
        call = f"{plan.attempt}/{job.prefix}"
        known = {blame.restart for blame in plan.blames}
        if self._read[0] != call:
            self._read = call, 0
        newest, faults = self._keys.first_causes(job, since=self._read[1])
        for host, fault in faults:
            restart = f"{call}{fault.iteration}"
            if host in plan.hosts and restart not in known:
                cause = f"{fault.cause} (rank {fault.rank})"
                yield Blame(host, restart, cause)
        self._read = call, newest  # not before all of them are in the chain

    def _unfit(self, plan: JobPlan, now: float) -> Entry | None:
        assert self._seen is not None
        # By machine: a host that comes back has another ID.
        faults: dict[tuple[str, str], list[Blame]] = collections.defaultdict(list)
        for blame, seen in zip(plan.blames, self._seen, strict=True):
            if now - seen <= self._window_s:
                host = plan.host(blame.host)
                faults[host.name, host.address].append(blame)
        for host in plan.hosts.values():
            found = faults.get((host.name, host.address), [])
            if len(found) >= self._limit and host.id not in plan.unfit:
                many = "a restart" if len(found) == 1 else f"{len(found)} restarts"
                within = "" if self._window_s == math.inf else f" within {self._window_s:g} s"
                reason = (
                    f"host {host} gets no more ranks: its ranks were the "
                    f"first cause of {many}{within} (--max-host-faults), the last time by "
                    f"{found[-1].cause}"
                )
                return Unfit(host.id, reason)
        return None
