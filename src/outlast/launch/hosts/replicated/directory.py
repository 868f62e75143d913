"""The hosts of the group, as one host reads them from the store: who has joined, who is lost.

Each change of the hosts is an event with a number, under a key of its own; the directory waits for
the next one. Each host reads each event once, so that the load grows with hosts times changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import EVENTS, JOINED, LOST, event_key

Submit = Callable[[Operation, Callable[[Result], None]], object]


@dataclass(frozen=True)
class Gone:
    """A host that is no longer in the group."""

    host: HostInfo
    reason: str
    orderly: bool


class Directory:
    """Reads the hosts, then follows their changes, from `start` on.

    Args:
        submit: starts a store operation; the second argument is called with its result.
        changed: called after each change.
    """

    def __init__(self, submit: Submit, changed: Callable[[], None]) -> None:
        self.hosts: dict[str, HostInfo] = {}  # in the order in which they joined
        self.gone: list[Gone] = []
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
        everyone = {h.id: h for h in map(HostInfo.decode, joined.splitlines())}
        ended = {said["id"]: said for said in map(json.loads, lost.splitlines())}
        self.hosts = {h: info for h, info in everyone.items() if h not in ended}
        self.gone = [
            Gone(everyone[h], str(said.get("reason", "")), bool(said.get("orderly")))
            for h, said in ended.items()
            if h in everyone
        ]
        self.known = True
        self._changed()
        # An event after `_seen` may have come meanwhile; then this wait returns at once.
        self._submit(Operation("wait_for", event_key(self._seen + 1)), self._event)

    def _event(self, result: Result) -> None:
        if isinstance(result, bytes):
            self._look()
