"""Runs this host's part of a job on many hosts, and joins again after a lost lease."""

from __future__ import annotations

import functools
import importlib
import socket
import sys
import time
from typing import cast

from outlast.errors import StoreError
from outlast.launch.agent.agent import Agent
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.hosts.host_group import GroupSpec, HostGroup
from outlast.launch.hosts.job.many_hosts import ManyHosts


def run_job(job: JobSpec, hosts: HostsSpec) -> int:
    """Run the job to its end; return its exit code.

    A host that has lost its lease has ended its workers, and the others go on without it. It may
    join again, as a new host: it takes an empty place, or waits as a spare.

    Raises:
        LaunchError: if this host cannot join the job.
    """
    endpoints = ", ".join(f"{host}:{port}" for host, port in hosts.endpoints)
    open_coordinator = functools.partial(
        ManyHosts, open_group=functools.partial(_open_group, hosts.backend)
    )
    while True:
        _say(f"looking for the hosts of run {job.run_id!r} at {endpoints} ({hosts.backend})")
        try:
            return Agent(job, open_coordinator).run()
        except StoreError as e:
            _say(
                f"host {socket.gethostname()} takes no part in the job any longer: {e}; its "
                "workers were ended, and it tries to join again as a new host"
            )


def _open_group(backend: str, spec: GroupSpec) -> HostGroup:
    package = "etcd" if backend == "etcd" else "replicated"
    module = importlib.import_module(f"outlast.launch.hosts.{package}.group")
    return cast(HostGroup, module.open_group(spec))


def _say(line: str) -> None:
    """Print a line while there is no console."""
    sys.stderr.write(f"[outlast] {time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()
