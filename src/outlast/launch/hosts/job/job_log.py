"""The keys of a job on many hosts in the agents' store: the chain of decisions, and reports.

job/plan/N       entry N of the chain                               first claim wins
job/cleared/A    log: hosts on which no process of attempt A is left
job/done/A       log: hosts whose workers have ended in attempt A, with their exit codes
job/replaced/A   number of replacements of single workers in attempt A
job/open/A       the workers' store of the host at place 0 serves attempt A
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
from typing import Any

from outlast.coordination.records import lines
from outlast.coordination.stores.store import Store
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import Decision
from outlast.launch.hosts.host_group import PrefixedStore


def plan_key(number: int) -> str:
    """The key of an entry of the chain."""
    return f"job/plan/{number}"


class JobLog:
    """The reports of all hosts. `host` is the ID of this one."""

    def __init__(self, store: Store, host: str, name: str) -> None:
        self._store, self._host, self._name = store, host, name

    def agree(self, name: str, value: str) -> str:
        """The value of the first host to ask."""
        return self._store.claim(f"job/agreed/{name}", value.encode()).decode()

    def clear(self, attempt: int) -> None:
        """No process of the attempt is left on this host."""
        self._append(f"job/cleared/{attempt}")

    def cleared(self, attempt: int) -> frozenset[str]:
        """The hosts on which no process of the attempt is left."""
        return frozenset(line["host"] for line in self._lines(f"job/cleared/{attempt}"))

    def finish(self, attempt: int, exit_codes: frozenset[int]) -> None:
        """The workers of this host have ended, and are not replaced."""
        self._append(f"job/done/{attempt}", codes=sorted(exit_codes))

    def done(self, attempt: int) -> frozenset[str]:
        """The hosts whose workers have ended."""
        return frozenset(line["host"] for line in self._lines(f"job/done/{attempt}"))

    def exit_codes(self, attempt: int) -> frozenset[int]:
        """The exit codes of the latest worker of each rank."""
        found = self._lines(f"job/done/{attempt}")
        return frozenset(code for line in found for code in line["codes"])

    def replaced(self, attempt: int, more: int = 0) -> int:
        """The number of replacements, after adding `more`."""
        return self._store.add(f"job/replaced/{attempt}", more)

    def fail(self, death: Death) -> None:
        """A worker of this host has failed."""
        fields = {**dataclasses.asdict(death), "decision": death.decision.value}
        self._append("job/failures", death={**fields, "host": self._name})

    def failures(self) -> list[Death]:
        """The failed workers of all hosts, in the order of the reports, which is that of `when`:
        the clocks of two hosts cannot be compared.
        """
        deaths = [line["death"] for line in self._lines("job/failures")]
        return [
            Death(**{**death, "decision": Decision(death["decision"]), "when": float(when)})
            for when, death in enumerate(deaths)
        ]

    def open_attempt(self, attempt: int) -> None:
        """The workers' store of the host at place 0 serves the attempt."""
        self._store.put(f"job/open/{attempt}", b"1")

    def await_open_attempt(self, attempt: int, limit_s: float) -> None:
        """Wait for that.

        Raises:
            KeyTimeout: after `limit_s` seconds.
        """
        self._store.wait_for(f"job/open/{attempt}", limit_s)

    def forget_before(self, attempt: int, store: PrefixedStore) -> None:
        """Deletes the keys of the attempts before `attempt`. `job/open/A` at last: by it, the next
        caller finds what this one has left.
        """
        for key in store.keys("job/open/"):
            ended = int(key.rpartition("/")[2])
            if ended < attempt:
                store.delete_prefix(f"w/{ended}/")
                for name in ("cleared", "done", "replaced", "open"):
                    store.delete(f"job/{name}/{ended}")

    def say_goodbye(self) -> None:
        """This host needs the store no longer."""
        self._append("job/bye")

    def goodbyes(self) -> frozenset[str]:
        """The hosts that need the store no longer."""
        return frozenset(line["host"] for line in self._lines("job/bye"))

    def _append(self, key: str, **fields: Any) -> None:
        line = json.dumps({"host": self._host, **fields})
        self._store.append(key, line.encode() + b"\n")

    def _lines(self, key: str) -> list[dict[str, Any]]:
        return lines(self._store.read(key))
