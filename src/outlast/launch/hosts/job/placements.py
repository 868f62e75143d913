"""The placement of a host's workers, from the decisions of the agents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outlast.launch import environment
from outlast.launch.config.placement import Placement
from outlast.launch.hosts.host_group import HostInfo
from outlast.launch.hosts.job.job_plan import JobPlan


def placement(
    plan: JobPlan, place: int, me: HostInfo, known: Iterable[HostInfo], page: Path | None
) -> Placement:
    """The placement of the workers of `me` at `place`.

    The library uses this host's own store server, which lives as long as the workers. Scripts that
    read `MASTER_ADDR` expect the host of rank 0.
    """
    first = next((host for host in known if host.id == plan.places[0]), me)
    variables = {
        "OUTLAST_STORE": f"{bracketed(me.address)}:{me.store_port}",
        "OUTLAST_HOST": me.id,
        "OUTLAST_HOST_ADDR": me.address,
        **({} if page is None else {"OUTLAST_FENCE": str(page)}),
        **environment.gloo_interface(me.address),
    }
    return Placement(
        store=(first.address, first.store_port),
        place=place,
        places=plan.size,
        attempt=plan.attempt,
        taken_over=plan.taken_over[place],
        variables=variables,
    )


def bracketed(address: str) -> str:
    """An address before a port: IPv6 addresses get brackets."""
    return f"[{address}]" if ":" in address else address


def ranks_text(place: int, nproc: int) -> str:
    """The ranks of a place, in words."""
    first, last = place * nproc, (place + 1) * nproc - 1
    return f"rank {first}" if nproc == 1 else f"ranks {first} to {last}"
