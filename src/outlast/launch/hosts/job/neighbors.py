"""The network of a host is checked before it runs ranks (`--health-check full`): each host of a
check makes an all-reduce with the two beside it in a ring.

A connection is not enough: a link may lose large packets, be far too slow, or give wrong data, and
a device of the network may serve some accelerators only. When hosts have joined that were in no
check, the leader's agent claims a `Check` of them; a host that joins a running job is checked with
one of it, by their CPUs, as the accelerators train. From the reports, the leader decides who leaves
as for broken links (`links.broken_ends`): a host that fails with both neighbors, and not these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence

from outlast.coordination.replicated.hosts import HostInfo
from outlast.errors import StoreError
from outlast.launch import environment
from outlast.launch.config.job_spec import Neighbor
from outlast.launch.health.host_check import CheckProcess
from outlast.launch.hosts.host_entries import Check, Checked
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.links import broken_ends, pair_text, without_closed
from outlast.launch.hosts.plan import Entry, JobPlan

_END_S = 5.0


class HostNeighbors:
    """The checks of this host with others, one at a time.

    Args:
        limit_s: for each; `None` if the job makes no such checks: then no port is opened.
        own: has the process IDs while they run. The agent does not end these with the workers: a
            host whose own processes were ended would seem to have failed.
    """

    def __init__(
        self, log: JobLog, me: HostInfo, limit_s: float | None, own: MutableSequence[int]
    ) -> None:
        self._log, self._me, self._own = log, me, own
        self._limit_s = limit_s or 0.0
        self._run: CheckRun | None = None
        self._listener: socket.socket | None = None
        if limit_s is None:
            return
        # Between two checks nobody accepts: a neighbor that is faster waits until this side does.
        self._listener = log.listen("check", me.address)

    def check(self, entry: Check, plan: JobPlan) -> None:
        """Report with which hosts of `entry` an all-reduce fails."""
        before = self._run
        self.cancel()
        if self._me.id not in entry.hosts:
            return
        self._run = run = CheckRun(self._own)
        others = [b if a == self._me.id else a for a, b in self._pairs(entry)]

        def work() -> None:
            if before is not None:  # two servers on one listener would take each other's neighbors
                before.over.wait()
            try:
                failed = self._failed(run, entry, plan)
            except StoreError:
                failed = None  # the agent meets it in its own operations, and handles it there
            except Exception as e:  # noqa: BLE001 - the leader waits for a report
                failed = dict.fromkeys(others, f"the check could not be made: {e!r}")
            finally:
                run.end()
                run.over.set()
            if failed is not None and not run.cancelled:
                with contextlib.suppress(StoreError):
                    self._log.report_links(entry.attempt, entry.key, failed)

        # A daemon: it must not keep the process alive.
        threading.Thread(target=work, name="neighbors", daemon=True).start()

    def cancel(self) -> None:
        """The result is not wanted any more: end what still runs, without a report."""
        if self._run is not None:
            self._run.cancel()

    def take_figures(self) -> str:
        """Those of the last check, in words, once."""
        if self._run is None:
            return ""
        figures, self._run.figures = self._run.figures, []
        return "; ".join(figures)

    def close(self) -> None:
        """End what still runs, and wait for that: this process may be about to end."""
        self.cancel()
        if self._run is not None:
            self._run.over.wait(_END_S)
        if self._listener is not None:
            self._listener.close()

    def _pairs(self, entry: Check) -> list[tuple[str, str]]:
        return [pair for pair in _ring(entry.hosts) if self._me.id in pair]

    def _failed(self, run: CheckRun, entry: Check, plan: JobPlan) -> dict[str, str]:
        assert self._listener is not None
        ports, me = self._log.ports("check"), self._me.id
        interface = environment.gloo_interface(self._me.address)
        started: dict[str, CheckProcess] = {}
        for first, second in self._pairs(entry):
            other = second if me == first else first
            neighbor = Neighbor(
                name=plan.host(other).name,
                key=f"{entry.key}/{first}",
                side=int(me == second),
                address=plan.host(first).address,
                port=ports[first],
                fd=self._listener.fileno(),
                # While ranks run, they have the accelerators.
                devices=not plan.running,
                limit_s=self._limit_s,
            )
            start = functools.partial(
                CheckProcess,
                dataclasses.asdict(neighbor),
                self._limit_s,
                first=f"the all-reduce with {neighbor.name}",
                # Not its warnings about hosts without a name.
                variables={"TORCH_CPP_LOG_LEVEL": "ERROR", **interface},
                fds=[neighbor.fd] if neighbor.side == 0 else [],
            )
            if process := run.start(start):
                started[other] = process
        failed = {other: process.failure() for other, process in started.items()}
        run.figures = [figure for process in started.values() for figure in process.figures]
        return {other: why for other, why in failed.items() if why}


class CheckRun:
    """The processes of one check, whose IDs `own` has. One thread starts and ends them, another may
    cancel it.
    """

    def __init__(self, own: MutableSequence[int]) -> None:
        self.figures: list[str] = []
        self.cancelled, self.over = False, threading.Event()
        self._lock = threading.Lock()
        self._processes: list[CheckProcess] = []
        self._own = own

    def start(self, start: Callable[[], CheckProcess]) -> CheckProcess | None:
        with self._lock:
            if self.cancelled:
                return None
            process = start()
            self._own.append(process.pid)
            self._processes.append(process)
            return process

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            for process in self._processes:
                process.kill()

    def end(self) -> str:
        """Kills what is left of them; in words if that does not help."""
        left = ""
        with self._lock:
            for process in self._processes:
                left += process.end()
                self._own.remove(process.pid)
            self._processes.clear()
        return left


def next_check(
    plan: JobPlan, leader: str, ready: Collection[str], reports: Mapping[str, Mapping[str, str]]
) -> Entry | None:
    """The check that the leader claims, or its result; `None` if nothing is to be claimed now.

    Args:
        ready: the hosts that have said on which port they can be checked.
        reports: of the check that runs: why it has failed, by host and neighbor.
    """
    if plan.check is not None:
        return _judged(plan.check, plan, leader, reports)
    new = unchecked(plan)
    if not new or not new <= set(ready):
        return None
    known = [host for host in plan.hosts if host in plan.checked and host not in plan.leaving]
    # Rather a spare, which has no ranks to disturb.
    known.sort(key=lambda host: plan.place_of(host) is None)
    hosts = (*known[-1:], *(host for host in plan.hosts if host in new))
    return Check(plan.attempt, f"check/{plan.number}", hosts) if len(hosts) > 1 else None


def unchecked(plan: JobPlan) -> set[str]:
    """The hosts in the group that have passed no check, and do not leave."""
    return plan.hosts.keys() - plan.checked - plan.leaving.keys()


def _judged(
    check: Check, plan: JobPlan, leader: str, reports: Mapping[str, Mapping[str, str]]
) -> Checked | None:
    new = [host for host in check.hosts if host not in plan.checked]
    found = broken_ends(check.hosts, plan, leader, reports, new)
    if found is None:
        return None
    excluded = {}
    for host, ends in found.items():
        why = reports[host].get(ends[0]) or reports[ends[0]][host]
        excluded[host] = (
            f"{pair_text(plan, host, ends)} fail the check of neighbors: {why}. "
            f"{plan.hosts[host].name} leaves the job, and tries again"
        )
    passed = {
        host
        for pair in _ring(check.hosts)
        if all(end in plan.hosts and end not in found for end in pair)
        for host in pair
    }
    return Checked(check.key, sorted(passed), excluded, without_closed(found))


def _ring(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of a ring. Each host is the first of one at most, for which it serves the store."""
    pairs = list(itertools.pairwise(hosts))
    return [*pairs, (hosts[-1], hosts[0])] if len(hosts) > 2 else pairs
