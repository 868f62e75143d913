"""The hosts of the group, as one host reads them from the store: who has joined, who is lost.

Each change of the hosts is an event with a number, under a key of its own, whose value is the name
of a log and the line that was appended to it. The directory reads both logs once, and then waits
for one event after the other: a change costs each host one line, and not the logs.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import EVENTS, JOINED, LOST, event_key
from outlast.launch.hosts.host_group import LostHost

Submit = Callable[[Operation, Callable[[Result], None]], object]


class Directory:
    """Reads the hosts, then follows their changes, from `start` on.

    Args:
        submit: starts a store operation; the second argument is called with its result.
        changed: called after each change.
    """

    def __init__(self, submit: Submit, changed: Callable[[], None]) -> None:
        self.hosts: dict[str, HostInfo] = {}  # in the order in which they joined
        self.gone: list[LostHost] = []
        self.known = False
        self._submit = submit
        self._changed = changed
        self._started = False
        self._seen = 0

    def start(self) -> None:
        """Begin to read; once."""
        if not self._started:
            self._started = True
            self._look()

    def _look(self) -> None:
        parts = tuple(Operation("read", key) for key in (EVENTS, JOINED, LOST))
        self._submit(Operation("batch", operations=parts), self._looked)

    def _looked(self, result: Result) -> None:
        if not isinstance(result, list) or len(result) != len((EVENTS, JOINED, LOST)):
            return  # the lease is over
        events, joined, lost = (part if isinstance(part, bytes) else b"" for part in result)
        self._seen = int(events or b"0")
        for line in joined.splitlines():
            self._joined(line)
        for line in lost.splitlines():
            self._lost(line)
        self.known = True
        self._changed()
        self._await_next()

    def _await_next(self) -> None:
        # An event that has come meanwhile is there: then this returns at once.
        self._submit(Operation("wait_for", event_key(self._seen + 1)), self._event)

    def _event(self, result: Result) -> None:
        if not isinstance(result, bytes):
            return  # the lease is over
        self._seen += 1
        log, _, line = result.partition(b"\n")
        if log == JOINED.encode():
            self._joined(line)
        else:
            self._lost(line)
        self._changed()
        self._await_next()

    def _joined(self, line: bytes) -> None:
        host = HostInfo.decode(line)
        self.hosts[host.id] = host

    def _lost(self, line: bytes) -> None:
        said = json.loads(line)
        host = self.hosts.pop(said["id"], None)
        if host is not None:
            reason, left = str(said["reason"]), bool(said["orderly"])
            self.gone.append(LostHost(host=host, reason=reason, left=left))
