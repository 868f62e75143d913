"""Keys that concern one host only: its store server keeps them, and no other host sees them.

Heartbeats are such keys: the monitor processes of a host watch each other, and the agents' leases
tell the hosts about each other. So heartbeats cost the store of all hosts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import Table
from outlast.coordination.stores.store import HOST_KEYS
from outlast.launch.hosts.server.combining import Combiner, Done, Upstream

Defer = Callable[[Callable[[], None]], object]


class Stores:
    """Sends each operation to where its key is kept, combined with others of the same place.

    Operations of one client on a key of the host and on another key may take effect in any order,
    unless one is answered before the other begins.
    """

    def __init__(self, upstream: Upstream, defer: Defer) -> None:
        self._all_hosts = Combiner(upstream, defer)
        self._this_host = Combiner(HostStore(defer), defer)

    def submit(self, client: Hashable, operation: Operation, done: Done) -> None:
        """Performs `operation`; `done` gets its result."""
        self._keeper(operation.key).submit(client, operation, done)

    def wait(self, key: str, done: Done) -> Callable[[], None]:
        """Calls `done` with the value of `key`, once it exists. Returns what ends the wait."""
        keeper = self._keeper(key)
        handle = keeper.wait(key, done)
        return lambda: keeper.cancel(handle)

    def forget_own(self, namespace: str) -> None:
        """Deletes the keys of this host in a namespace whose clients are gone."""
        operation = Operation("delete_prefix", namespace)
        self._this_host.submit(namespace, operation, lambda _: None)

    def _keeper(self, key: str) -> Combiner:
        # After the namespace, `w/ATTEMPT/`, and the "/" of torch's client.
        parts = key.split("/", 3)
        own = len(parts) == 4 and parts[3].startswith(HOST_KEYS)
        return self._this_host if own else self._all_hosts


class HostStore:
    """The keys of one host, in memory."""

    def __init__(self, defer: Defer) -> None:
        self._defer = defer
        self._table = Table()
        self._waits: dict[int, tuple[str, Done]] = {}
        self._numbers = itertools.count()

    def submit(self, operation: Operation, done: Done) -> Hashable:
        number = next(self._numbers)
        if operation.name == "wait_for":
            self._waits[number] = operation.key, done
            self._defer(self._wake)
            return number
        result: Result = self._table.perform(operation)
        self._table.appeared.clear()
        self._defer(lambda: done(result))
        self._defer(self._wake)
        return number

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, int)
        self._waits.pop(handle, None)

    def _wake(self) -> None:
        for number, (key, done) in list(self._waits.items()):
            if key in self._table.keys:
                del self._waits[number]
                done(self._table.keys[key])
