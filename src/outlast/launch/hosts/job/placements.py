"""The placement of a host's workers, from the decisions of the agents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch import environment
from outlast.launch.config.job_spec import Placement
from outlast.launch.hosts.job.job_plan import JobPlan
from outlast.launch.hosts.server.store_server import LOOPBACK


def placement(
    plan: JobPlan, place: int, me: HostInfo, known: Iterable[HostInfo], page: Path | None
) -> Placement:
    """The placement of the workers of `me` at `place`.

    `MASTER_ADDR` is this host's own store server, which lives as long as the workers and listens on
    loopback; the servers of all hosts show the same store. It is not the host of rank 0, as with
    torchrun: `init_process_group` does not need that, and nothing is left open to the network. A
    script that serves something on the host of rank 0 finds its address in `OUTLAST_MASTER_ADDR`.
    """
    first = next((host for host in known if host.id == plan.places[0]), me)
    variables = {
        "OUTLAST_STORE": f"{LOOPBACK}:{me.store_port}",
        "OUTLAST_MASTER_ADDR": first.address,
        "OUTLAST_HOST": me.id,
        "OUTLAST_HOST_ADDR": me.address,
        **({} if page is None else {"OUTLAST_FENCE": str(page)}),
        **environment.gloo_interface(me.address),
    }
    return Placement(
        store=(LOOPBACK, me.store_port),
        place=place,
        places=plan.size,
        attempt=plan.attempt,
        taken_over=plan.taken_over[place],
        variables=variables,
    )


def ranks_text(place: int, nproc: int) -> str:
    """The ranks of a place, in words."""
    first, last = place * nproc, (place + 1) * nproc - 1
    return f"rank {first}" if nproc == 1 else f"ranks {first} to {last}"
