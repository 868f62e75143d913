"""The keys of a job on many hosts in the agents' store, besides the chain: reports of the hosts.

job/cleared/A    log: hosts on which no process of attempt A is left
job/done/A       log: hosts whose workers have ended in attempt A, with their exit codes
job/replaced/A   log: replacements of single workers in attempt A, after which progress
job/within-time  log: these and the restarts of all workers, if only those of a certain time count:
                 each until its host has seen that time pass on its own clock
job/links/A/KEY  log: other hosts with which a probe or a check has failed, and why, by each host
job/link-ports   log: the port of each host to which others connect in a probe
job/check-ports  log: the port of each host to which others connect in a check
job/forgotten    the first attempt whose keys are not deleted
job/failures     log: deaths of workers from which the job has not recovered
job/bye          log: hosts that need the store no longer
job/agreed/NAME  a value that is the same on all hosts              first claim wins

The keys of an attempt A, and those of its workers, `w/A/...`, are deleted when attempt A + 2
starts. By then, no process of A is left: A + 1 was started after each host had cleared A, or was
lost, and a lost host is refused by the store. Only a spare can be so late that it still applies
decisions of A. If it leads, it may read these keys, but what it decides then has no effect: the
entry that it claims is there. The chain stays (about 200 bytes for each attempt), because a host
that joins late computes the state of the job from all of it, and so does `job/failures`, which is
for the report.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from outlast.coordination.records import lines
from outlast.coordination.replicated.operations import Operation, OperationStore
from outlast.launch.agent.death_log import Death
from outlast.launch.hosts.plan import JobPlan
from outlast.system.sockets import listen


class JobLog:
    """The reports of all hosts. `host` is the ID of this one.

    Args:
        window_s: how long restarts count; infinite: until there is progress.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        store: OperationStore,
        host: str,
        name: str,
        window_s: float = math.inf,
        later: Callable[[float, Callable[[], None]], object] = lambda *_: None,
    ) -> None:
        self._store, self._host, self._name = store, host, name
        self._window_s, self._later = window_s, later

    def agree(self, name: str, value: str) -> str:
        return self._store.claim(f"job/agreed/{name}", value.encode()).decode()

    def clear(self, attempt: int) -> None:
        self._append(f"job/cleared/{attempt}")

    def cleared(self, attempt: int) -> frozenset[str]:
        return frozenset(line["host"] for line in self._lines(f"job/cleared/{attempt}"))

    def finish(self, attempt: int, exit_codes: frozenset[int]) -> None:
        """The workers of this host have ended, and are not replaced."""
        self._append(f"job/done/{attempt}", codes=sorted(exit_codes))

    def done(self, attempt: int) -> frozenset[str]:
        return frozenset(line["host"] for line in self._lines(f"job/done/{attempt}"))

    def exit_codes(self, attempt: int) -> frozenset[int]:
        found = self._lines(f"job/done/{attempt}")
        return frozenset(code for line in found for code in line["codes"])

    def used(self, plan: JobPlan, progress: str = "") -> int:
        """How many restarts and replacements count against the limit: those since the last
        `progress`, or of the last `window_s` seconds. Those of a lost host count as its loss.
        """
        return self._used(self._lines(self._counted(plan)), plan, progress)

    def _used(self, lines: list[dict[str, Any]], plan: JobPlan, progress: str) -> int:
        here = [each for each in lines if each["host"] in plan.hosts]
        if self._in_window:
            return sum(int(each["n"]) for each in here)
        found = sum(int(each["n"]) for each in here if each["progress"] == progress)
        return found if progress else plan.used + found

    def take(self, plan: JobPlan, progress: str, limit: int) -> int | None:
        """Counts a replacement; how many count with this one, `None` if it may not be used."""
        key, line = self._counted(plan), self._line(progress=progress, n=1)
        _, value = self._store.perform_all(Operation("append", key, line), Operation("read", key))
        used = self._used(lines(value), plan, progress)
        if used > limit:  # another host may have taken the last one
            self._count(plan, progress, -1)
            return None
        if self._in_window:
            self._later(self._window_s, lambda: self._count(plan, "", -1))
        return used

    def restarted(self, plan: JobPlan) -> None:
        """Counts a restart of all workers, which `JobPlan.used` counts for ever."""
        if self._in_window:
            self._count(plan, "")
            self._later(self._window_s, lambda: self._count(plan, "", -1))

    @property
    def _in_window(self) -> bool:
        return self._window_s < math.inf

    def _count(self, plan: JobPlan, progress: str, n: int = 1) -> None:
        self._append(self._counted(plan), progress=progress, n=n)

    def _counted(self, plan: JobPlan) -> str:
        return "job/within-time" if self._in_window else f"job/replaced/{plan.attempt}"

    def listen(self, kind: Literal["link", "check"], address: str) -> socket.socket:
        """Other hosts may connect to this socket, in a probe or a check."""
        listener = listen(address)
        self._append(f"job/{kind}-ports", port=listener.getsockname()[1])
        return listener

    def ports(self, kind: Literal["link", "check"]) -> dict[str, int]:
        return {line["host"]: line["port"] for line in self._lines(f"job/{kind}-ports")}

    def report_links(self, attempt: int, key: str, failed: Mapping[str, str]) -> None:
        """A probe or a check has ended on this host: it failed with these hosts, for a reason."""
        self._append(f"job/links/{attempt}/{key}", failed=failed)

    def links(self, attempt: int, key: str) -> dict[str, dict[str, str]]:
        return {line["host"]: line["failed"] for line in self._lines(f"job/links/{attempt}/{key}")}

    def fail(self, death: Death) -> None:
        named = dataclasses.replace(death, host=self._name)
        self._append("job/failures", death=msgspec.to_builtins(named))

    def failures(self) -> list[Death]:
        """The failed workers of all hosts, in the order of the reports, which is that of `when`:
        the clocks of two hosts cannot be compared.
        """
        found = enumerate(self._lines("job/failures"))
        deaths = [{**line["death"], "when": when} for when, line in found]
        return msgspec.convert(deaths, list[Death])

    def forget_before(self, attempt: int) -> None:
        """Deletes the keys of the attempts before `attempt`. `job/forgotten` at last: by it, the
        next caller finds what this one has left.
        """
        store = self._store
        first = int(store.read("job/forgotten") or b"0")
        for ended in range(first, attempt):
            store.delete_prefix(f"w/{ended}/")
            store.delete_prefix(f"job/links/{ended}/")
            for name in ("cleared", "done", "replaced"):
                store.delete(f"job/{name}/{ended}")
        if attempt > first:
            store.put("job/forgotten", str(attempt).encode())

    def say_goodbye(self) -> None:
        self._append("job/bye")

    def goodbyes(self) -> frozenset[str]:
        return frozenset(line["host"] for line in self._lines("job/bye"))

    def _append(self, key: str, **fields: Any) -> None:
        self._store.append(key, self._line(**fields))

    def _line(self, **fields: Any) -> bytes:
        return json.dumps({"host": self._host, **fields}).encode() + b"\n"

    def _lines(self, key: str) -> list[dict[str, Any]]:
        return lines(self._store.read(key))
