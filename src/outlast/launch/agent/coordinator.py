"""The agent and its job: what the agent asks for, and what it is told to do.

On many hosts, the agents of all hosts agree on the answers through a store
(`outlast.launch.hosts.job`). On one host they are immediate: the launcher decides alone, and hosts
the store, which outlives any worker.

That launcher binds the port itself and passes the listening socket to torch, for three reasons: the
store listens on the requested address only, not on all of them; a port in use gives a clear error;
and a new attempt gets an empty store on the same port, which no other process can take in between.
(torchrun separates attempts by a new store or, in older versions of torch, by a prefix of keys; the
workers see no difference.)
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from outlast.errors import LaunchError
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import JobRecord, faults_that_count
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.config.job_spec import Placement
from outlast.system.lease_page import HostPage

if TYPE_CHECKING:
    from outlast.coordination.stores.torch_store import TorchStore
    from outlast.launch.agent.agent import Agent
    from outlast.launch.agent.resources import JobResources

_BACKLOG = 4096
_TIMEOUT = datetime.timedelta(seconds=300)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all agents know at the end of a job."""

    job: JobRecord  # the state of the wrapped function
    # the signal that told the job to stop, to whichever agent
    received: signal.Signals | None = None
    # the deaths on all hosts, in the order of their reports, which is that of `when`; `None` if the
    # job has one host
    failures: Sequence[Death] | None = None
    cause: str = ""  # why the job ended, if no worker has caused it
    # the exit codes of the latest worker of each rank on other hosts
    codes: frozenset[int] = frozenset()
    joined_late: bool = False  # whether this host joined a job that ran already
    links: tuple[str, ...] = ()  # which links between hosts were broken, in words
    left: str = ""  # why this host has left a job that goes on, if it has
    left_in_order: bool = True  # whether none of its ranks was killed instead


class Coordinator(Protocol):
    """Makes the decisions that concern all workers. A `cause` is a line for other hosts' users. It
    tells the agent what to do, always in the thread of the agent's event loop.

    Attributes:
        lease_page: the file that the orphan killer watches; `None` if this host needs no lease.
        keys: of the workers' store.
        used: the number of restarts and replacements that count against `--max-restarts` now.
        host_id: this host's, for the names of processes; empty if the job has one host.
        leaves: whether the ranks of this host leave a job that goes on.
    """

    lease_page: Path | None
    host_id: str

    @property
    def keys(self) -> JobKeys: ...
    @property
    def used(self) -> int: ...
    @property
    def leaves(self) -> bool: ...

    def replaces(self, rank: int) -> bool:
        """Whether a rank of this host that dies is replaced on it."""

    def agree(self, name: str, value: str) -> str:
        """A value that is the same on all hosts: that of the first to ask."""

    def ready(self) -> None:
        """No process of the job is left on this host: the next attempt may start."""

    def take_replacement(self, limit: int, progress: str) -> int | None:
        """Count a replacement, if fewer than `limit` are used since the last `progress`; returns
        their number with this one, `None` if it may not be used.
        """

    def restart(self, cause: str, death: Death) -> None:
        """Restart all workers, because of the failure of this host's worker."""

    def end(self, cause: str, pid: int) -> None:
        """End the job, because of the failure of this host's worker `pid`."""

    def leave(self, reason: str) -> None:
        """Have this host leave a job on many hosts: a `HostUnfit`. Nothing if it is ending."""

    def ask_to_leave(self, reason: str) -> None:
        """Have this host leave a job on many hosts in order: its ranks move."""

    def stop(self, number: signal.Signals) -> None:
        """End the job, because the agent has received a signal."""

    def failed(self, death: Death) -> None:
        """Tell the other hosts of the end of a worker."""

    def finished(self, exit_codes: frozenset[int]) -> None:
        """No process of the job is left on this host, and no worker will be replaced."""

    def close(self) -> None: ...


OpenCoordinator: TypeAlias = "Callable[[JobResources, Agent], Coordinator]"
"""Opens the coordinator of a job, before anything else of the job is opened; this may take long. A
`LaunchError` if this host cannot take part in the job.
"""


class OneHost(Coordinator):
    """The coordinator of a job on one host. No other host needs to know of a failure; when a rank
    has to leave, the job goes on here without it, or stays as it is.
    """

    host_id = ""
    lease_page = None
    leaves = False

    def __init__(self, resources: JobResources, agent: Agent) -> None:
        job = resources.job
        self._store = JobStore(job.master_addr, job.master_port)
        self._agent = agent
        self._attempt = 0
        self._aborts = HostPage()
        self._clock, self._window_s = resources.loop.clock, job.restart_window_s
        self._faults: list[tuple[str, float]] = []  # after which progress, and when

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self._store.client)

    @property
    def used(self) -> int:
        return faults_that_count(self._faults, *self._now(), self._window_s)

    def _now(self) -> tuple[str, float]:
        return self.keys.job().progress, self._clock.now()

    def replaces(self, rank: int) -> bool:
        return True

    def agree(self, name: str, value: str) -> str:
        return value

    def ready(self) -> None:
        if self._attempt:
            self._store.renew()
        store = (self._store.host, self._store.port)
        variables = {"OUTLAST_READ_LEASE": str(self._aborts.path)}
        self._agent.start(Placement(store=store, attempt=self._attempt, variables=variables))
        self._attempt += 1

    def take_replacement(self, limit: int, progress: str) -> int | None:
        used = self.used
        if used >= limit:
            return None
        self._faults.append((progress, self._clock.now()))
        return used + 1

    def restart(self, cause: str, death: Death) -> None:
        self._faults.append(self._now())
        self._agent.restart("")

    def end(self, cause: str, pid: int) -> None:
        self._agent.end("")

    def stop(self, number: signal.Signals) -> None:
        self._agent.stop(number, "")

    def finished(self, exit_codes: frozenset[int]) -> None:
        self._agent.finish(Outcome(job=self.keys.ended_job()))

    def close(self) -> None:
        self._aborts.close()
        self._store.close()


class JobStore:
    """The store, and its address. `client` performs operations on it. Listens on `host`, an address
    of this machine, and `port`, or a free port if that is 0.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self.client = self._serve()

    def renew(self) -> None:
        """Replace the store by an empty one at the same address; no client may be left."""
        # The old server closes its copy of the socket before the new one gets a copy: two servers
        # on one socket would each get some of the workers.
        del self.client
        self.client = self._serve()

    def close(self) -> None:
        self._listener.close()
        del self.client

    def _serve(self) -> TorchStore:
        # Imported here: this takes seconds, and a job on many hosts has another store.
        import torch.distributed as dist

        from outlast.coordination.stores.torch_store import TorchStore, listening

        server = dist.TCPStore(  # type: ignore[attr-defined]
            host_name=self.host,
            port=self.port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            **listening(os.dup(self._listener.fileno())),
        )
        return TorchStore(server, f"{self.host}:{self.port}")


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise LaunchError(f"--master-addr {host}: {e.strerror}") from e
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6  # `::` is of IPv4, too
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as e:
        where, why = f"{host} port {port}", os.strerror(e.errno or 0)
        raise LaunchError(f"the job's store cannot listen on {where}: {why}") from e
