"""What a launcher tells the workers of this host, and its user of this host and of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch import environment
from outlast.launch.config.job_spec import JobSpec, Placement
from outlast.launch.hosts.places import ranks_text
from outlast.launch.hosts.plan import JobPlan, Leave, Move, Return, Stay
from outlast.launch.hosts.server.store_server import LOOPBACK
from outlast.system.sockets import is_loopback


def greeting(job: JobSpec, me: HostInfo) -> Iterator[str]:
    """The lines with which a launcher begins."""
    assert job.hosts is not None
    minimum, maximum = job.hosts.minimum, job.hosts.maximum
    number = str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
    yield f"this host is {me.name} ({me.address}); run {job.run_id!r} needs {number} hosts"
    # etcd has users of its own, and the launchers of its jobs no ports.
    if job.secret is None and job.hosts.backend != "etcd" and not is_loopback(me.address):
        yield (
            "this job has no secret: everyone who can reach the ports of its hosts can disturb "
            "it. Set OUTLAST_TOKEN to the output of `openssl rand -hex 32` on all hosts, or "
            "give --token-file"
        )


def placement(plan: JobPlan, me: HostInfo, place: int, page: Path | None) -> Placement:
    """What the workers of this host at `place` are told, also of the host that is to leave it, if
    one is; `page` is that of the host's lease.

    `MASTER_ADDR` is this host's own store server, which lives as long as the workers and listens on
    loopback; the servers of all hosts show the same store. It is not the host of rank 0, as with
    torchrun: `init_process_group` does not need that, and nothing is left open to the network. A
    script that serves something on the host of rank 0 finds its address in `OUTLAST_MASTER_ADDR`.
    """
    leave = plan.predecessor(me.id)
    variables = {
        "OUTLAST_STORE": f"{LOOPBACK}:{me.store_port}",
        "OUTLAST_MASTER_ADDR": plan.host(plan.places[0]).address,
        "OUTLAST_HOST": me.id,
        "OUTLAST_HOST_ADDR": me.address,
        "OUTLAST_FENCE": str(page),
        "OUTLAST_READ_LEASE": str(page),
        **environment.gloo_interface(me.address),
        **({"OUTLAST_SUCCEEDS": f"{leave.host} {leave.reason}"} if leave else {}),
    }
    return Placement(
        store=(LOOPBACK, me.store_port),
        place=place,
        places=plan.size,
        attempt=plan.attempt,
        taken_over=plan.taken_over[place],
        variables=variables,
    )


def move_text(entry: Leave | Stay | Move | Return, plan: JobPlan, nproc: int) -> str:
    """What was decided on a host that is to leave, in words."""
    name = plan.host(entry.host).name
    if isinstance(entry, Leave):
        return f"host {name} is to leave the job: {entry.reason}"
    if isinstance(entry, Stay):
        return f"host {name} does not leave: {entry.reason}"
    if isinstance(entry, Return):
        return f"the ranks of host {name} stay there, until another host can take them"
    s = "s" if nproc == 1 else ""
    to = f"move{s} to host {plan.host(entry.to).name}" if entry.to else f"leave{s} the job"
    return f"{ranks_text(plan.moves[entry.host], nproc)} of host {name} {to} at the end of a step"
