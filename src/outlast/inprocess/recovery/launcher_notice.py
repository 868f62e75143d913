"""Tells the launcher the state of the job, so that it knows when a replacement is useful.

One key in the launcher's store holds the newest call that has begun, and the prefix of its keys,
under which the launcher finds a request to stop. Every change is a compare-and-set: another rank
may already be in the next call, and a joiner may arrive at a call that has ended. The processes
that have completed the call are a log of their own: many append at once.
"""

from __future__ import annotations

import json

from outlast.coordination.records import COMPLETED_BY
from outlast.inprocess.store import Connection

_KEY = "outlast/job"


class LauncherNotice:
    """The notices of one call. `process` names this one to `outlast run`; else it is empty."""

    def __init__(self, connection: Connection, call: int, prefix: str, *, process: str) -> None:
        self._connection, self._call, self._prefix = connection, call, prefix
        self._process = process
        self._running = self._record("running")

    def running(self) -> None:
        held = json.loads(self._connection.claim(_KEY, self._running.encode()))
        while held["call"] < self._call:
            held = json.loads(self._change(json.dumps(held), self._running))

    def aborted(self, *, reports: bool) -> None:
        """The members ended the job; `outlast run` reads which process reported why (`reports`)."""
        held = self._running
        while True:
            record = json.loads(held)
            if record["call"] != self._call or record["state"] == "completed":
                return
            wanted = {**record, "state": "aborted"}
            if reports:
                wanted["reporter"] = self._process
            held = self._change(held, json.dumps(wanted))
            if json.loads(held) == wanted:
                return  # otherwise another rank was first

    def completed(self) -> None:
        """The call has completed. `outlast run` also reads the names of the processes that
        completed it: if one of them fails afterwards, the job has failed; any other was lost
        earlier. The name comes first: a process that ends after the call has completed is in the
        log that the launcher reads then.
        """
        if self._process:
            key = self._prefix + COMPLETED_BY
            self._connection.append(key, f"{self._process}\n".encode())
        self._change(self._running, self._record("completed"))

    def _record(self, state: str) -> str:
        return json.dumps({"call": self._call, "state": state, "prefix": self._prefix})

    def _change(self, before: str, after: str) -> str:
        return self._connection.compare_set(_KEY, before.encode(), after.encode()).decode()
