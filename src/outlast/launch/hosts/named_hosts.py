"""Which hosts of a job a user means, who has given their names, or a rank."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.launch.hosts.places import ranks_text
from outlast.launch.hosts.plan import Asked, JobPlan, Leave, MoveRank


class NoSuchHost(Exception):
    """No host of the job has this name, address, ID or rank; or several have it."""


def asked_of(
    plan: JobPlan, names: Iterable[str], rank: int, reason: str, request: str
) -> dict[str, Asked]:
    """The entries for these hosts, which are to leave, or for a rank that is to move if it is not
    -1; and each in words. `request` is an ID.
    """
    if rank < 0:
        leaves = leaves_of(plan, names, reason)
        return {f"host {plan.hosts[each.host]}": each for each in leaves}
    nproc = plan.nproc
    host = plan.places[rank // nproc] if rank < len(plan.places) * nproc else ""
    if not plan.running or host not in plan.hosts:
        ranks = ", ".join(
            ranks_text(p, nproc) for p, h in enumerate(plan.places) if h in plan.hosts
        )
        raise NoSuchHost(f"no host runs rank {rank}; those that run: {ranks or 'none'}")
    text = f"rank {rank} of host {plan.hosts[host]}"
    return {text: MoveRank(host, rank, reason, request)}


def leaves_of(plan: JobPlan, names: Iterable[str], reason: str) -> list[Leave]:
    """The entries by which these hosts are to leave: each by its name, its address or its ID. A
    `NoSuchHost` names those that there are.
    """
    found = []
    for name in names:
        hosts = [each for each in plan.hosts.values() if name in (each.id, each.name, each.address)]
        if len(hosts) != 1:
            there = ", ".join(f"{each} is {each.id}" for each in hosts or plan.hosts.values())
            what = (
                "several hosts of the job are called" if hosts else "no host of the job is called"
            )
            raise NoSuchHost(f"{what} {name!r}: {there}")
        found.append(Leave(hosts[0].id, reason))
    return found
