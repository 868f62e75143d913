"""Runs this host's part of a job on many hosts, and joins again after a lost lease."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import cast

from outlast.errors import StoreError
from outlast.launch.agent.agent import Agent
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.health.host_check import check_host
from outlast.launch.hosts.host_group import GroupSpec, HostGroup
from outlast.launch.hosts.job.links import LeftOut
from outlast.launch.hosts.job.many_hosts import ManyHosts
from outlast.launch.hosts.rank_order import own_topology
from outlast.launch.workers.output import say_early
from outlast.system.lease_page import LeasePage

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0
_LASTING_S = 300.0
"""After so long in a group, the pause before this host joins again is short again."""
_SHM = "/dev/shm"
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_job(job: JobSpec, hosts: HostsSpec) -> int:
    """Run the job to its end; return its exit code.

    A host that has lost its lease has ended its workers, and the others go on without it. It may
    join again, as a new host: it takes an empty place, or waits as a spare. So may one that was
    left out because of a broken link, once that works. A `LaunchError` if this host cannot join the
    job. A `HostUnfit` if it must not.
    """
    endpoints = ", ".join(f"{host}:{port}" for host, port in hosts.endpoints)
    pause_s = _FIRST_PAUSE_S
    with _signals_end_the_search():
        topology = own_topology(hosts)
        if topology:
            say_early(f"ranks follow the network, where this host is at {'/'.join(topology)}")
        open_group = functools.partial(_open_group, topology=topology)
        open_coordinator = functools.partial(ManyHosts, open_group=open_group)
        while True:
            check_host(job.health, say_early)
            began = time.monotonic()
            say_early(
                f"looking for the hosts of run {job.run_id!r} at {endpoints} ({hosts.backend})"
            )
            try:
                return Agent(job, open_coordinator).run()
            except LeftOut as e:
                say_early(f"{e}; the workers of this host were ended, and it waits for its links")
                pause_s = _paused(pause_s, began, e.wait())
            except StoreError as e:
                why = f"host {socket.gethostname()} takes no part in the job any longer: {e}; its "
                pause_s = _paused(pause_s, began, f"{why}workers were ended")


def _paused(pause_s: float, began: float, why: str) -> float:
    """Waits before this host joins again; returns the next pause. A host that is lost again and
    again costs the others a restart each time.
    """
    say_early(f"{why}: this host tries to join the job again as a new host in {pause_s:.0f} s")
    time.sleep(pause_s)
    lasted = time.monotonic() - began > _LASTING_S
    return _FIRST_PAUSE_S if lasted else min(2 * pause_s, _LAST_PAUSE_S)


@contextlib.contextmanager
def _signals_end_the_search() -> Iterator[None]:
    """Let signals end this process by an exception while it looks for the others. Their default
    action would leave the lease page behind, and the others would wait for the lease of this host.

    Once this host has joined, the agent's event loop handles them (and SIGINT is an exception).
    """
    # One that is ignored (`nohup`) stays ignored.
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, _end_search)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end_search(number: int, _: FrameType | None) -> None:
    name = signal.Signals(number).name
    say_early(f"{name}: this host ends before it has joined the job")
    raise SystemExit(128 + number)


def _open_group(job: JobSpec, topology: tuple[str, ...]) -> tuple[HostGroup, Path]:
    """The group that this host has joined, and the page of its lease."""
    hosts = job.hosts
    assert hosts is not None
    etcd = hosts.backend == "etcd"
    kind, name = ("etcd", "EtcdGroup") if etcd else ("replicated", "ReplicatedGroup")
    module = importlib.import_module(f"outlast.launch.hosts.{kind}.group")
    # In memory: a write to a mapped file may wait for a busy disk, and the lease would end.
    memory = _SHM if os.access(_SHM, os.W_OK) else None
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="outlast-", dir=memory))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        page = LeasePage.create(folder)
        spec = GroupSpec(
            run_id=job.run_id,
            endpoints=hosts.endpoints,
            local_addr=hosts.local_addr,
            lease_s=hosts.lease_s,
            join_limit_s=hosts.join_s,
            settings=job.settings,
            place=hosts.place,
            topology=topology,
            conf=hosts.conf,
            page=page,
            say=say_early,
            secret=job.secret,
        )
        group = cast(HostGroup, getattr(module, name)(spec))
        stack.callback(group.close, leave=True)
        group.start()
        stack.pop_all()
    return group, page.path
