"""Broken links between hosts that all reach the leader: how one is found, and who leaves the job.

The leases do not show such a link, but collectives use it: a job in which it is broken hangs at
each restart. So in a restart whose cause may be a link (`records.suspects_link`), the members wait
(`recovery/waits.py`), and the leader's agent claims a `Probe`: each host of the group
tries to connect to each other one, and reports which it could not reach for as long as a host may
be silent. Without a suspicion, no connection is made. From the reports the leader decides `Links`:
few hosts without which all links are whole. Each of them ends its workers and leaves the group, so
for the others it is a lost host: a spare takes its place, or the job goes on without it. It joins
again as a new host, once it has connected to all that it could not reach.

A connection needs packets in both directions, so a link that is broken in one direction is found
too. The port is one that the system has chosen, like those of the workers; a network that drops
packets of some ports only may let it pass, and then no link is found broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from outlast.coordination.replicated.hosts import HostInfo
from outlast.errors import StoreError
from outlast.launch.agent.resources import JobResources
from outlast.launch.hosts.host_entries import Checked, Links, Probe
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.plan import JobPlan
from outlast.system.units import listed

Address = tuple[str, int]

_AT_ONCE = 256
"""Connections of one probe at a time: far fewer than a process may have descriptors."""
_AGAIN_S = 0.2
"""Between two attempts to connect to a host that refuses it."""
_SELDOM_S, _PATIENCE_S = 5.0, 3.0
"""The pause between two looks of a host that waits for its links, and how long one takes."""


class LeftOut(StoreError):
    """This host has left the job because of its links; `wait` returns when it may join again."""

    def __init__(
        self, reason: str, own: str, broken: Mapping[str, Address], whole: Mapping[str, Address]
    ) -> None:
        super().__init__(reason)
        self._own, self._broken, self._whole = own, broken, whole

    def wait(self) -> str:
        """Returns what has ended the wait: the links work, or the other hosts no longer answer,
        because the job is over for example; then the search for the group says what follows.
        """
        while True:
            missed = unreached(self._own, {**self._broken, **self._whole}, _PATIENCE_S)
            if not missed & self._broken.keys():
                return "its links work again"
            if missed >= self._whole.keys():
                return "none of the hosts that it has reached answers any longer"
            time.sleep(_SELDOM_S)


class HostLinks:
    """The links of this host: others connect to its port, and it probes theirs."""

    def __init__(self, log: JobLog, me: HostInfo, lease_s: float, resources: JobResources) -> None:
        self._log, self._me, self._lease_s = log, me, lease_s
        self._loop, self._resources = resources.loop, resources
        self._listener = log.listen("link", me.address)
        self._listener.setblocking(False)
        # The kernel completes connections: the link of an agent that is busy is not broken.
        self._loop.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def probe(self, entry: Probe, hosts: Iterable[HostInfo]) -> None:
        """Report which hosts of `entry` cannot be reached; `hosts` are those in the group."""
        if self._me.id not in entry.hosts:
            return  # it joined meanwhile: no report is expected from it
        wanted = [host for host in hosts if host.id in entry.hosts]

        def work() -> None:
            # The agent meets the same error in its own operations, and handles it there.
            with contextlib.suppress(StoreError):
                missed = unreached(self._me.address, self._addresses(wanted), self._lease_s)
                self._log.report_links(entry.attempt, entry.key, dict.fromkeys(missed, ""))

        # A daemon: connections that are not answered must not keep the process alive.
        threading.Thread(target=work, name="link probe", daemon=True).start()

    def decided(self, entry: Links | Checked, hosts: Iterable[HostInfo], *, leads: bool) -> None:
        """Say what was found. A `LeftOut` if this host is one that leaves."""
        if self._me.id in entry.excluded:
            raise self._left_out(entry, hosts)
        for reason in entry.excluded.values():
            self._resources.console.say(reason)
        if isinstance(entry, Links) and not entry.excluded and leads:
            self._resources.console.say(
                "all hosts reach each other: the restart has another cause than a broken link"
            )

    def _left_out(self, entry: Links | Checked, hosts: Iterable[HostInfo]) -> LeftOut:
        ends = entry.waits_for[self._me.id]
        addresses = self._addresses(hosts)
        broken = {host: address for host, address in addresses.items() if host in ends}
        whole = {host: address for host, address in addresses.items() if host not in ends}
        return LeftOut(entry.excluded[self._me.id], self._me.address, broken, whole)

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def _addresses(self, hosts: Iterable[HostInfo]) -> dict[str, Address]:
        ports = self._log.ports("link")
        others = [host for host in hosts if host.id in ports and host.id != self._me.id]
        return {host.id: (host.address, ports[host.id]) for host in others}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile, or no descriptor is left
            self._listener.accept()[0].close()


def unreached(own: str, targets: Mapping[str, Address], patience_s: float) -> frozenset[str]:
    """The targets with which no connection from the address `own` could be made for so long."""

    async def all_of_them() -> frozenset[str]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def missed(address: Address) -> bool:
            async with limit:
                return not await _connects(own, address, patience_s)

        found = await asyncio.gather(*map(missed, targets.values()))
        return frozenset(name for name, miss in zip(targets, found, strict=True) if miss)

    return asyncio.run(all_of_them())


async def _connects(own: str, address: Address, patience_s: float) -> bool:
    # From this host's own address, as its workers: another route may be whole.
    local = (own, 0) if (":" in own) == (":" in address[0]) else None
    until = time.monotonic() + patience_s
    while (left_s := until - time.monotonic()) > 0:
        try:
            connecting = asyncio.open_connection(*address, local_addr=local)
            writer = (await asyncio.wait_for(connecting, left_s))[1]
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(_AGAIN_S)
        else:
            writer.close()
            return True
    return False


def judge(
    probe: Probe, plan: JobPlan, leader: str, reports: Mapping[str, Collection[str]]
) -> Links | None:
    """What follows from the reports; `None` while one is missing of a host that is in the group."""
    found = broken_ends(probe.hosts, plan, leader, reports)
    if found is None:
        return None
    excluded = {
        host: f"{pair_text(plan, host, ends)} do not reach each other, though both still have "
        f"their leases: {plan.hosts[host].name} leaves the job until they do"
        for host, ends in found.items()
    }
    return Links(probe.attempt, probe.key, excluded, without_closed(found))


def broken_ends(
    names: Collection[str],
    plan: JobPlan,
    leader: str,
    reports: Mapping[str, Collection[str]],
    new: Collection[str] = (),
) -> dict[str, list[str]] | None:
    """The hosts that have to leave, each with those with which its links are broken; `None` while a
    report is missing of a host that is in the group. `reports` has the other ends, by host.

    Of the links that are left, the host with the most leaves: so one whose own network is at fault
    leaves, and not its peers. Hosts in `new` leave before any other. Of equal ones a spare, then
    one that does not lead, then the one at the highest place.
    """
    there = {host for host in plan.hosts if host in names}
    if there - reports.keys():
        return None
    pairs = {
        (min(host, other), max(host, other))
        for host, missed in reports.items()
        for other in missed
        if host in there and other in there
    }

    def order(host: str) -> tuple[bool, int, bool, bool, int, str]:
        place = plan.place_of(host)
        return (
            host in new,
            sum(host in pair for pair in left),
            place is None,
            host != leader,
            -1 if place is None else place,
            host,
        )

    left, found = sorted(pairs), {}
    while left:
        leaves = max({host for pair in left for host in pair}, key=order)
        found[leaves] = [a if b == leaves else b for a, b in left if leaves in (a, b)]
        left = [pair for pair in left if leaves not in pair]
    return found


def without_closed(found: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """What each host that leaves waits for: the port of one that leaves too is closed."""
    return {host: [end for end in ends if end not in found] for host, ends in found.items()}


def pair_text(plan: JobPlan, host: str, others: Sequence[str]) -> str:
    """A host and the other ends of its links, in words."""
    one, *ends = (plan.hosts[name] for name in (host, *others))
    return f"host {one} and host {listed(ends)}"
