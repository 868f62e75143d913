"""The agent and its job: what the agent asks for, and what it is told to do.

On one host the answers are immediate (`one_host`). On many hosts, the agents of all hosts agree on
them through a store (`outlast.launch.hosts.job`).
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.agent.job_keys import JobKeys

if TYPE_CHECKING:
    from outlast.launch.agent.agent import Agent
    from outlast.launch.agent.resources import JobResources


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


class Coordinator(Protocol):
    """Makes the decisions that concern all workers. A `cause` is a line for other hosts' users. It
    tells the agent what to do, always in the thread of the agent's event loop.

    Attributes:
        lease_page: the file that the orphan killer watches; `None` if this host needs no lease.
        keys: of the workers' store.
        used: the number of restarts and replacements that count against `--max-restarts` now.
        host_id: this host's, for the names of processes; empty if the job has one host.
    """

    @property
    def lease_page(self) -> Path | None: ...
    @property
    def keys(self) -> JobKeys: ...
    @property
    def used(self) -> int: ...
    @property
    def host_id(self) -> str: ...

    def agree(self, name: str, value: str) -> str:
        """A value that is the same on all hosts: that of the first to ask."""

    def ready(self) -> None:
        """No process of the job is left on this host: the next attempt may start."""

    def take_replacement(self, limit: int) -> bool:
        """Count a replacement, if fewer than `limit` are used."""

    def restart(self, cause: str, death: Death) -> None:
        """Restart all workers, because of the failure of this host's worker."""

    def end(self, cause: str, pid: int) -> None:
        """End the job, because of the failure of this host's worker `pid`."""

    def stop(self, number: signal.Signals) -> None:
        """End the job, because the agent has received a signal."""

    def failed(self, death: Death) -> None: ...

    def finished(self, exit_codes: frozenset[int]) -> None:
        """No process of the job is left on this host, and no worker will be replaced."""

    def close(self) -> None: ...


OpenCoordinator: TypeAlias = "Callable[[JobResources, Agent], Coordinator]"
"""Opens the coordinator of a job, before anything else of the job is opened; this may take long.

Raises:
    LaunchError: if this host cannot take part in the job.
"""
