"""The operations of the store on etcd, as coroutines that yield requests.

**Exactly once.** The answer to a request may be lost: by a dead connection, a member that is
killed, a new leader. The request was then performed, or not, or it will be performed later. Each
client has *slots*; a slot has at most one write in flight, and a key in etcd that holds the name
of its last write. Every write is one transaction, of one operation or several that then take effect
together. Besides its work it overwrites the slot's key,
on the condition that this key is as this slot's write before it left it (its revision of
modification, 0 for none). So:

- A write can be sent again at will: of all copies only one can meet the condition, as it changes
  the key's revision. A copy that arrives late, when the slot has gone on to other writes, is
  refused for the same reason.
- If the condition fails and the slot's key holds the name of this very write, then an earlier copy
  went through, at the revision of the key: the result is what etcd held at that revision.
- A write whose result stays unknown (no answer until the time limit, a refusal after a lost answer)
  leaves the revision of its slot unknown. The slot is then abandoned, never used again, and the
  caller gets a `StoreError`; the write may still be performed, as on any store out of reach.

**The fence.** The key of the host, and all its slots, are under the host's lease. When the lease
expires, etcd deletes them in one revision. Every write also has the condition that the host's key
exists: from that revision on, all writes of the host are refused, those in flight too.

**Linearizable.** Writes are transactions, which etcd's consensus orders. Reads are transactions
that write nothing, which etcd performs as linearizable reads. `add` counts in its own transaction,
so the sum includes exactly the amounts up to its own revision.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlast.coordination.replicated.operations import Failed, Keys, Operation, Single
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.layout import Json, KeyValue
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError

T = TypeVar("T")

NOT_FOUND, OUT_OF_RANGE = 5, 11  # gRPC's codes
_MOST, _LARGEST_BYTES = 16, 2**20
"""Of a transaction: etcd's limits are 128 steps, of which an operation has up to 6, and 1.5 MiB."""
_RANGES = frozenset({"keys", "delete_prefix"})


class NoAnswer(Exception):
    """A request was not answered: it was performed, or not, or will be."""


class LeaseOver(StoreError):
    """The lease of this host has expired: etcd refuses its writes."""


@dataclass(frozen=True)
class Call:
    """A request for the driver to send. It raises `NoAnswer` or `Refused`; before a repetition
    (`attempt` above 0) it waits a little, and raises a `StoreError` at the end of its time.
    """

    path: str
    body: Json
    attempt: int


@dataclass(frozen=True)
class Event:
    """A wait for the driver: until a base is written at a revision above `after`, or that cannot be
    excluded. It returns the value that was written, True if the value has to be read, and False if
    the time of the wait is over.
    """

    base: bytes
    after: int


@types.coroutine
def _ask(request: Call | Event) -> Generator[Call | Event, Any, Any]:
    return (yield request)


async def call(path: str, body: Json) -> Json:
    """Sends a request until it is answered: only for requests that may be performed twice."""
    attempt = 0
    while True:
        try:
            return cast(Json, await _ask(Call(path, body, attempt)))
        except NoAnswer:
            attempt += 1


@dataclass(frozen=True)
class Fence:
    """Under what lease a host writes. The lease 0 and no key: not fenced."""

    host_key: bytes = b""
    lease: int = 0


class Slot:
    """The place of one write at a time, and the name of the last."""

    def __init__(self, root: bytes, client: str) -> None:
        self._prefix, self._client = root + b"o/", client
        self._writes = 0
        self.abandon()

    def abandon(self) -> None:
        """Begins a new slot: the revision of this one is unknown."""
        self.revision = 0
        self.key = self._prefix + f"{self._client}/{self._writes}".encode()

    def next_name(self) -> str:
        self._writes += 1
        return f"{self._client}.{self._writes}"


@dataclass(frozen=True)
class Written:
    """A write that went through. Without `responses`, `now` has the entries of each key as read
    later.
    """

    revision: int
    responses: list[Json] | None
    now: list[list[KeyValue]]


class Operations:
    """The operations of one slot. See `Store` for their meaning."""

    def __init__(self, root: bytes, slot: Slot, fence: Fence) -> None:
        self._root, self._slot, self._fence = root, slot, fence

    async def look(self, key: str) -> tuple[bytes | None, int]:
        found, revision = await self._entries(key)
        return layout.value_of(found), revision

    async def wait_for(self, key: str, timeout: float | None) -> bytes:
        in_time = True
        base = layout.base_key(self._root, key)
        while True:
            value, revision = await self.look(key)
            if value is not None:
                return value
            if not in_time:
                raise KeyTimeout(f"no {key!r} within {timeout} s in etcd")
            came = await _ask(Event(base, after=revision))
            if isinstance(came, bytes):
                return came
            in_time = came

    async def perform(self, operations: Sequence[Operation]) -> list[Single]:
        """Performs operations in their order: as many at once as one transaction can hold. What
        fails alone is a `Failed`.
        """
        results: list[Single] = []
        for some in _transactions(operations):
            results += await self._together(some)
        return results

    async def _together(self, operations: Sequence[Operation]) -> list[Single]:
        if _compares(operations[0]):
            return [await self._compare_set(operations[0])]
        name = self._slot.next_name()
        work = [self._steps(operation, name.encode()) for operation in operations]
        steps = [step for each in work for step in each]
        if any(operation.writes and not _reads(operation) for operation in operations):
            written = await self._write([operation.key for operation in operations], steps, name)
        else:
            answer = await call("/v3/kv/txn", layout.transaction([], steps, []))
            written = Written(layout.revision_of(answer), answer["responses"], [])
        results: list[Single] = []
        responses = iter(written.responses or ())
        for number, (operation, each) in enumerate(zip(operations, work, strict=True)):
            own = None if written.responses is None else [next(responses) for _ in each]
            now = written.now[number] if own is None else []
            try:
                found = await self._result(operation, own, written.revision, now)
            except layout.NoNumber as e:
                kind = layout.ONE if operation.amount == 1 else layout.AMOUNT
                entry = layout.entry_key(self._root, operation.key) + kind + name.encode()
                await self._write([operation.key], [layout.delete(entry)], self._slot.next_name())
                found = Failed(str(e))
            if operation.name == "compare_set" and found == b"" != operation.value:
                found = await self._compare_set(operation)  # the key was there, with no bytes
            results.append(found)
        return results

    def _steps(self, operation: Operation, name: bytes) -> list[Json]:
        """What an operation does in a transaction with this name."""
        key, value = operation.key, operation.value
        base, entries = layout.base_key(self._root, key), layout.entry_key(self._root, key)
        end = layout.end_of(entries)
        absent = [layout.created(base, 0)]
        read = [layout.get(base), layout.get(entries, end)]
        if _reads(operation):
            return read
        match operation.name:
            case "check":
                return [layout.get(base, count_only=True)]
            case "keys":
                return [layout.get(base, layout.end_of(base), keys_only=True)]
            case "put":
                return [layout.delete(entries, end), layout.put(base, value)]
            case "delete":
                return [layout.delete(base), layout.delete(entries, end)]
            case "delete_prefix":
                entries = entries[:-1]
                return [layout.delete(each, layout.end_of(each)) for each in (base, entries)]
            case "claim" | "compare_set":
                return [layout.nested(absent, [layout.put(base, value)]), *read]
        appears = layout.nested(absent, [layout.put(base, b"")])
        if operation.name == "append":
            return [appears, layout.put(entries + layout.APPENDED + name, value)]
        kind = layout.ONE if operation.amount == 1 else layout.AMOUNT

        def each(kind: bytes) -> tuple[bytes, bytes]:
            return entries + kind, layout.end_of(entries + kind)

        return [
            appears,
            layout.put(entries + kind + name, b"%d" % operation.amount),
            layout.get(base),
            layout.get(*each(layout.APPENDED), count_only=True),
            layout.get(*each(layout.AMOUNT)),
            layout.get(*each(layout.ONE), count_only=True),
        ]

    async def _result(
        self, operation: Operation, responses: list[Json] | None, revision: int, now: list[KeyValue]
    ) -> Single:
        """The result of an operation that was performed at `revision`. Without its responses, it is
        what etcd held then; `now` are the entries as read later.
        """
        key, name = operation.key, operation.name
        base = layout.base_key(self._root, key)
        if name in ("put", "append", "delete_prefix"):
            return None
        if name == "keys" and responses is not None:
            cut = len(layout.store_keys(self._root))
            return Keys(tuple(entry.key[cut:].decode() for entry in layout.entries(responses[0])))
        if name == "check" and responses is not None:
            return layout.count(responses[0])
        if name == "delete":
            if responses is None:
                return int(bool(await self._at(key, revision - 1)))
            return int(responses[0]["response_delete_range"].get("deleted", 0))
        if name == "add" and responses is not None and not layout.count(responses[3]):
            _, _, before, _, amounts, ones = responses
            return (
                layout.number(layout.value_of(layout.entries(before)), base)
                + sum(int(entry.value) for entry in layout.entries(amounts))
                + layout.count(ones)
            )
        if responses is None or name == "add":
            found = await self._at(key, revision, now)
        else:
            found = [entry for each in responses[-2:] for entry in layout.entries(each)]
        value = layout.value_of(found)
        if name == "check":
            return int(value is not None)
        return layout.number(value, base) if name == "add" else value

    async def _compare_set(self, operation: Operation) -> bytes | None:
        """Sets `key` if it is `expected` (empty: absent); its value afterwards, or `None`."""
        key = operation.key
        base, entries = layout.base_key(self._root, key), layout.entry_key(self._root, key)
        end = layout.end_of(entries)
        while True:
            found, revision = await self._entries(key)
            held = layout.value_of(found)
            if (held or b"") != operation.expected:
                return held
            # Unchanged since that revision: nothing was written, by the first conditions, nor
            # deleted, by the last: who deletes one entry of a key deletes or writes its base.
            unchanged = [layout.created(base, 0)]
            if found:
                unchanged = [
                    layout.unchanged_since(base, base + b"\0", revision),
                    layout.unchanged_since(entries, end, revision),
                    layout.created(base, found[0].created),
                ]
            replace = [layout.delete(entries, end), layout.put(base, operation.value)]
            work = [layout.nested(unchanged, replace), *self._read(key)]
            written = await self._write([key], work, self._slot.next_name())
            if written.responses is None:
                found = await self._at(key, written.revision, written.now[0])
            else:
                found = [e for each in written.responses[-2:] for e in layout.entries(each)]
            held = layout.value_of(found)
            mine = any(not e.kind and e.modified == written.revision for e in found)
            if mine or (held or b"") != operation.expected:
                return held

    # ------------------------------------------------------------------------------ requests

    async def _entries(self, key: str, revision: int = 0) -> tuple[list[KeyValue], int]:
        """The base and the entries of `key`, at a revision or now, and the present revision."""
        answer = await call("/v3/kv/txn", layout.transaction([], self._read(key, revision), []))
        found = [entry for each in answer["responses"] for entry in layout.entries(each)]
        return found, layout.revision_of(answer)

    def _read(self, key: str, revision: int = 0) -> list[Json]:
        options: Json = {"revision": str(revision)} if revision else {}
        entries = layout.entry_key(self._root, key)
        return [
            layout.get(layout.base_key(self._root, key), **options),
            layout.get(entries, layout.end_of(entries), **options),
        ]

    async def _write(self, keys: Sequence[str], work: list[Json], name: str) -> Written:
        slot, fence = self._slot, self._fence
        conditions = [layout.modified(slot.key, slot.revision)]
        if fence.host_key:
            conditions.append(layout.present(fence.host_key))
        body = layout.transaction(
            conditions,
            [layout.put(slot.key, name.encode(), fence.lease), *work],
            [
                layout.get(slot.key),
                layout.get(fence.host_key or slot.key),
                *(step for key in keys for step in self._read(key)),
            ],
        )
        try:
            answer = await call("/v3/kv/txn", body)
            if answer.get("succeeded"):
                slot.revision = layout.revision_of(answer)
                return Written(slot.revision, answer["responses"][1:], [])
            last, host, *now = (layout.entries(response) for response in answer["responses"])
            if last and last[0].value == name.encode():
                slot.revision = last[0].modified
                both = zip(now[::2], now[1::2], strict=True)
                return Written(slot.revision, None, [base + rest for base, rest in both])
            if fence.host_key and not host:
                raise LeaseOver("the lease of this host in etcd has expired: it may not write")
            raise StoreError(f"the record of the last write of {slot.key!r} was changed in etcd")
        except Refused as e:
            slot.abandon()
            if fence.lease and e.code == NOT_FOUND:
                raise LeaseOver("the lease of this host in etcd has expired") from e
            raise StoreError(f"etcd refused a write of {', '.join(keys)!r}: {e}") from e
        except BaseException:
            slot.abandon()
            raise

    async def _at(self, key: str, revision: int, now: Sequence[KeyValue] = ()) -> list[KeyValue]:
        """The entries of `key` at an earlier revision. `now` are those of a later revision."""
        then = [entry for entry in now if entry.modified <= revision]
        if then:
            # No write since then removed an entry: it would have deleted or written the base, and
            # removed all entries.
            return then
        try:
            return (await self._entries(key, revision))[0]
        except Refused as e:
            if e.code != OUT_OF_RANGE:
                raise
            raise StoreError(
                f"the result of an operation on {key!r} is lost: its answer did not arrive, and "
                f"etcd has compacted revision {revision} since"
            ) from e


def _reads(operation: Operation) -> bool:
    """Whether it is a read, by its name or as a `compare_set` that changes nothing."""
    same = operation.value == operation.expected != b""
    return operation.name == "read" or (operation.name == "compare_set" and same)


def _compares(operation: Operation) -> bool:
    """Whether it needs a read before: it replaces a value."""
    return operation.name == "compare_set" and operation.expected not in (b"", operation.value)


def _transactions(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations that one transaction can hold: it has limits of its size, and writes no key after
    another operation on it. One that concerns a range of keys, or needs a read before, is alone.
    """
    found: list[list[Operation]] = []
    keys: set[str] = set()
    size, alone = 0, True
    for operation in operations:
        was_alone, alone = alone, operation.name in _RANGES or _compares(operation)
        size += len(operation.value)
        again = operation.key in keys and not _reads(operation)
        over = size > _LARGEST_BYTES
        if alone or was_alone or over or again or len(found[-1]) == _MOST:
            found.append([])
            keys, size = set(), len(operation.value)
        found[-1].append(operation)
        keys.add(operation.key)
    return found
