"""Two hosts, as far as a check of neighbors concerns them: in one process, with addresses of their
own on the loopback interface.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.store import MemoryStore
from outlast.launch.hosts.host_entries import Check
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.neighbors import HostNeighbors
from outlast.launch.hosts.plan import JobPlan
from procs import NET_S

PAIR = tuple(
    HostInfo(id=name, name=name, address=f"127.0.0.{number}")
    for number, name in enumerate("ab", start=2)
)


class Reports(JobLog):
    """The log of a host, and an event for its report."""

    def __init__(self, store: Any, host: str) -> None:
        super().__init__(store, host, host)
        self.made = threading.Event()

    def report_links(self, attempt: int, key: str, failed: Mapping[str, str]) -> None:
        super().report_links(attempt, key, failed)
        self.made.set()


class Pids(list[int]):
    """The processes of checks, and an event for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def append(self, pid: int) -> None:
        super().append(pid)
        self.begun.set()


class Pair:
    """The two hosts, which share a store. `close` ends their checks."""

    def __init__(self, limit_s: float = NET_S) -> None:
        store = MemoryStore()
        self.own = Pids()
        self.logs = [Reports(store, host.id) for host in PAIR]
        self.hosts = [
            HostNeighbors(log, host, limit_s, self.own)
            for log, host in zip(self.logs, PAIR, strict=True)
        ]

    def check(self, plan: JobPlan | None = None, *, only: int | None = None) -> None:
        """Begin a check on both hosts, or on one of them."""
        entry = Check(0, "check/1", ("a", "b"))
        plan = plan or JobPlan(hosts={host.id: host for host in PAIR})
        for host in self.hosts if only is None else [self.hosts[only]]:
            host.check(entry, plan)

    def reports(self, *expected: int) -> dict[str, dict[str, str]]:
        """What both hosts have reported, or those expected."""
        for number in expected or (0, 1):
            assert self.logs[number].made.wait(NET_S)
        return self.logs[0].links(0, "check/1")

    def close(self) -> None:
        for host in self.hosts:
            host.close()
