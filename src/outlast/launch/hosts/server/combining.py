"""Combines the operations of a host's clients, so that the store's load grows with hosts.

While one batch of operations is in flight to the store, the next one gathers (a group commit: no
timer delays an operation). Within a batch, operations on one key become one operation: N appends
one append, N additions one addition, whose sum is handed out in parts, N equal reads one read. A
batch is one message, and one entry in the log of the replicated store.

Why the clients cannot tell the difference. An operation takes effect at some point between its
submission and its answer, and all operations of a client take effect in the order in which the
client sent them; nothing else is promised (linearizability). All operations of a batch have been
submitted before it is sent, and are answered after its result has arrived. So any order among them
is a valid one if it keeps the order of each client's operations, and the batch takes effect as a
whole, in such an order: group after group, and in a group in the order of joining. An operation
joins only a group that does not lie before one with an earlier operation of the same client
(`_Batch.add`). A batch is sent only when the one before has been answered, so the order is kept
across batches too. (Several in flight, of different clients, were tried with etcd and dropped: a
restart took longer, as each of them costs every member of etcd.)

Why one operation can stand for its group, i.e. gives each member the result that it would have had
if they had been performed one after the other, with nothing in between:

- `append`: the values in the order of joining.
- `put`: the last value; no operation observes the others. `delete`: the first one finds the key, if
  it exists, and the others do not.
- `add`: the sum before the group is the result minus all amounts; each member adds those up to its
  own.
- `claim`: the first value, if the key is absent; all members get the value that the key then has.
- `compare_set` with the same expectation, if the first value differs from it: if the first one
  succeeds, the key no longer has the expected value, and all others get that value. If it is
  refused, nothing changes, and the others are refused too. Identical ones need no such condition:
  after the first, the second changes nothing, whether it succeeds or not.
- `read`, `check`, `keys`: they change nothing, so all get the same.

Waits are shared too: one wait for each key is in flight, and all its clients get its value. For a
client that joined when the answer was on its way already, that may be an earlier value, if the key
was written again meanwhile: see `Store.wait_for`. A deletion that came from this host ends the
sharing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import structs

from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import Table
from outlast.coordination.stores.store import HOST_KEYS

Done = Callable[[Result], None]
Defer = Callable[[Callable[[], None]], object]


class Upstream(Protocol):
    """The store of all hosts, as seen by one event loop. Operations that are in flight together
    may take effect in any order; each takes effect at most once, and exactly once if its result is
    not `Failed`.
    """

    def submit(self, operation: Operation, done: Done) -> Hashable:
        """Starts `operation`; calls `done` with its result, later, from the event loop. Returns
        a handle for `cancel`.
        """

    def cancel(self, handle: Hashable) -> None:
        """Gives up a wait: `done` is not called any more. No effect if it has been called."""


# A batch that is larger than this takes no more operations; the next one does.
MAX_BATCH_BYTES = 4 << 20


class Combiner:
    """Sends the operations of many clients upstream, combined. `defer`: calls a function once, at
    the end of the event loop's current iteration: what all clients have sent until then leaves
    together.
    """

    def __init__(self, upstream: Upstream, defer: Defer) -> None:
        self._upstream, self._defer = upstream, defer
        self._batches: deque[_Batch] = deque()  # they gather
        self._in_flight = self._deferred = False
        self._waits: dict[str, SharedWait] = {}  # those that a new client may join
        self._unsent: list[SharedWait] = []
        self._numbers = itertools.count()

    def submit(self, client: Hashable, operation: Operation, done: Done) -> None:
        """Performs `operation` after all that `client` has submitted before; `done` gets its
        result, which is a `Failed` if the operation or the store fails.
        """
        if operation.name == "delete":
            self._waits.pop(operation.key, None)
        if not self._batches or self._batches[-1].size >= MAX_BATCH_BYTES:
            self._batches.append(_Batch())
        self._batches[-1].add(client, operation, done)
        self._send_soon()

    def wait(self, key: str, done: Done) -> tuple[SharedWait, int]:
        """Calls `done` with the value of `key`, once it exists. Returns a handle for `cancel`.

        All that this client has submitted before must have been answered: the order of a wait and
        an operation that are in flight together is not known.
        """
        shared = self._waits.get(key)
        if shared is None:
            shared = self._waits[key] = SharedWait(key)
            self._unsent.append(shared)
            self._send_soon()
        number = next(self._numbers)
        shared.waiting[number] = done
        return shared, number

    def cancel(self, handle: tuple[SharedWait, int]) -> None:
        """Ends a wait: its `done` is not called any more. No effect if the wait has ended."""
        shared, number = handle
        if shared.waiting.pop(number, None) is None or shared.waiting:
            return
        self._end_sharing(shared)
        if shared.handle is not None:
            self._upstream.cancel(shared.handle)

    def _end_sharing(self, shared: SharedWait) -> None:
        if self._waits.get(shared.key) is shared:
            del self._waits[shared.key]

    def _send_soon(self) -> None:
        if not self._deferred and (self._unsent or not self._in_flight):
            self._deferred = True
            self._defer(self._send)

    def _send(self) -> None:
        self._deferred = False
        if self._batches and not self._in_flight:
            self._in_flight = True
            batch = self._batches.popleft()
            self._upstream.submit(batch.combined(), partial(self._answered, batch))
        unsent, self._unsent = self._unsent, []
        for shared in unsent:
            if shared.waiting:
                wait = Operation("wait_for", shared.key)
                shared.handle = self._upstream.submit(wait, partial(self._woken, shared))

    def _answered(self, batch: _Batch, result: Result) -> None:
        self._in_flight = False
        if self._batches:
            self._send_soon()
        batch.answer(result)

    def _woken(self, shared: SharedWait, result: Result) -> None:
        shared.handle = None
        self._end_sharing(shared)
        woken, shared.waiting = shared.waiting, {}
        for done in woken.values():
            done(result)


@dataclass
class SharedWait:
    """The waits of all clients for one key."""

    key: str
    waiting: dict[int, Done] = field(default_factory=dict)
    handle: Hashable | None = None


class _Group:
    """Operations on one key that become one. Each `done` gets its own part of the result."""

    def __init__(self, operation: Operation) -> None:
        self._first = operation
        self._values: list[bytes] = []
        self._amounts: list[int] = []
        self._done: list[Done] = []

    def accepts(self, operation: Operation) -> bool:
        """Whether one operation can stand for this one too: the module's docstring says why."""
        first = self._first
        if first.name == "add":  # the sum is encoded with 64 bits
            return abs(sum(self._amounts) + operation.amount) < 1 << 62
        return (
            first.name != "compare_set"
            or first.value != first.expected
            or operation.value == first.value
        )

    def join(self, operation: Operation, done: Done) -> None:
        self._values.append(operation.value)
        self._amounts.append(operation.amount)
        self._done.append(done)

    def combined(self) -> Operation:
        match self._first.name:
            case "append":
                return structs.replace(self._first, value=b"".join(self._values))
            case "put":
                return structs.replace(self._first, value=self._values[-1])
            case "add":
                return structs.replace(self._first, amount=sum(self._amounts))
        return self._first

    def answer(self, result: Result) -> None:
        match self._first.name, result:
            case "add", int(total):
                total -= sum(self._amounts)
                for amount, done in zip(self._amounts, self._done, strict=True):
                    total += amount
                    done(total)
            case "delete", int():
                self._done[0](result)
                for done in self._done[1:]:
                    done(0)
            case _:
                for done in self._done:
                    done(result)


_SEPARATE = frozenset({"delete_prefix", "batch"})


class _Batch:
    """Groups in the order in which they take effect."""

    def __init__(self) -> None:
        self.size = 0
        self._groups: list[_Group] = []
        self._newest: dict[tuple[str, str, bytes], int] = {}  # the last group for such operations
        self._last: dict[Hashable, int] = {}  # the group of a client's last operation

    def add(self, client: Hashable, operation: Operation, done: Done) -> None:
        self.size += len(operation.key) + len(operation.value)
        kind = (operation.name, operation.key, operation.expected)
        place = self._newest.get(kind, -1)
        # An earlier group than that of the client's last operation would change their order.
        if (
            place < self._last.get(client, 0)
            or operation.name in _SEPARATE
            or not self._groups[place].accepts(operation)
        ):
            place = self._newest[kind] = len(self._groups)
            self._groups.append(_Group(operation))
        self._last[client] = place
        self._groups[place].join(operation, done)

    def combined(self) -> Operation:
        operations = tuple(group.combined() for group in self._groups)
        return operations[0] if len(operations) == 1 else Operation("batch", operations=operations)

    def answer(self, result: Result) -> None:
        """Hands out the results, in the order in which the operations took effect."""
        if len(self._groups) == 1:
            self._groups[0].answer(result)
            return
        results = result if isinstance(result, list) else [result] * len(self._groups)
        for group, part in zip(self._groups, results, strict=True):
            group.answer(part)


class Stores:
    """Sends each operation to where its key is kept, combined with others of the same place.

    Operations of one client on a key of the host and on another key may take effect in any order,
    unless one is answered before the other begins.
    """

    def __init__(self, upstream: Upstream, defer: Defer) -> None:
        self._all_hosts = Combiner(upstream, defer)
        self._this_host = Combiner(HostStore(defer), defer)

    def submit(self, client: Hashable, operation: Operation, done: Done) -> None:
        self._keeper(operation.key).submit(client, operation, done)

    def wait(self, key: str, done: Done) -> Callable[[], None]:
        """Calls `done` as `Combiner.wait` does. Returns what ends the wait."""
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
