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
    """The entries for these hosts, which are to leave, each by its name, its address or its ID; or
    for a rank that is to move if it is not -1; and each in words. `request` is an ID.
    """
    leaves: dict[str, Asked] = {}
    for name in names if rank < 0 else ():
        hosts = [each for each in plan.hosts.values() if name in (each.id, each.name, each.address)]
        if len(hosts) != 1:
            there = ", ".join(f"{each} is {each.id}" for each in hosts or plan.hosts.values())
            what = "several hosts of the job are" if hosts else "no host of the job is"
            raise NoSuchHost(f"{what} called {name!r}: {there}")
        leaves[f"host {hosts[0]}"] = Leave(hosts[0].id, reason)
    if rank < 0:
        return leaves
    nproc = plan.nproc
    host = plan.places[rank // nproc] if rank < len(plan.places) * nproc else ""
    if not plan.running or host not in plan.hosts:
        ranks = ", ".join(
            ranks_text(p, nproc) for p, h in enumerate(plan.places) if h in plan.hosts
        )
        raise NoSuchHost(f"no host runs rank {rank}; those that run: {ranks or 'none'}")
    text = f"rank {rank} of host {plan.hosts[host]}"
    return {text: MoveRank(host, rank, reason, request)}
