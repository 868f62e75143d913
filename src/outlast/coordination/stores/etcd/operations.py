"""The operations of the store on etcd, as coroutines that yield requests.

**Exactly once.** The answer to a request may be lost: by a dead connection, a member that is
killed, a new leader. The request was then performed, or not, or it will be performed later. Each
client has *slots*; a slot has at most one write in flight, and a key in etcd that holds the name
of its last write. Every write is one transaction that, besides its work, overwrites the slot's key,
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

**Linearizable.** Writes are transactions, which etcd's consensus orders. Reads are linearizable
ranges (etcd's default). `add` counts in its own transaction, so the sum includes exactly the
amounts up to its own revision.
"""

from __future__ import annotations

import types
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlast.coordination.replicated.operations import Keys
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.layout import Json, KeyValue
from outlast.coordination.stores.store import KeyTimeout
from outlast.errors import StoreError

T = TypeVar("T")

NOT_FOUND, OUT_OF_RANGE = 5, 11  # gRPC's codes


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
    """A wait for the driver: until a key of a range is written at a revision above `after`, or that
    cannot be excluded. It returns the value that was written as `start`, True if the value has to
    be read, and False if the time of the wait is over.
    """

    start: bytes
    end: bytes
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
        self._prefix, self._client = layout.slot_keys(root), client
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
    """A write that went through. Without `responses`, `now` has the entries as read later."""

    name: str
    revision: int
    responses: list[Json] | None
    now: list[KeyValue]


class Operations:
    """The operations of one slot. See `Store` for their meaning."""

    def __init__(self, root: bytes, slot: Slot, fence: Fence) -> None:
        self._root, self._slot, self._fence = root, slot, fence

    def _range(self, key: str) -> tuple[bytes, bytes]:
        base = layout.base_key(self._root, key)
        return base, layout.end_of(base)

    # -------------------------------------------------------------------------------- reads

    async def _entries(self, key: str, revision: int = 0) -> tuple[list[KeyValue], int]:
        options: Json = {"revision": str(revision)} if revision else {}
        answer = await call("/v3/kv/range", layout.range_of(*self._range(key), **options))
        return layout.entries(answer), layout.revision_of(answer)

    async def look(self, key: str) -> tuple[bytes | None, int]:
        found, revision = await self._entries(key)
        return layout.value_of(found), revision

    async def read(self, key: str) -> bytes | None:
        return (await self.look(key))[0]

    async def wait_for(self, key: str, timeout: float | None) -> bytes:
        in_time = True
        while True:
            value, revision = await self.look(key)
            if value is not None:
                return value
            if not in_time:
                raise KeyTimeout(f"no {key!r} within {timeout} s in etcd")
            came = await _ask(Event(*self._range(key), after=revision))
            if isinstance(came, bytes):
                return came
            in_time = came

    async def check(self, key: str) -> int:
        body = layout.range_of(*self._range(key), count_only=True)
        return int(int((await call("/v3/kv/range", body)).get("count", 0)) > 0)

    async def keys(self, prefix: str) -> Keys:
        start = layout.store_keys(self._root) + prefix.encode()
        body = layout.range_of(start, layout.end_of(start), keys_only=True)
        found = layout.entries(await call("/v3/kv/range", body))
        cut = len(layout.store_keys(self._root))
        names = {entry.key[cut:].partition(b"\0")[0].decode() for entry in found}
        return Keys(tuple(sorted(names)))

    # ------------------------------------------------------------------------------- writes

    async def put(self, key: str, value: bytes) -> None:
        base, end = self._range(key)
        await self._write(key, [layout.delete(base + b"\0", end), layout.put(base, value)])

    async def append(self, key: str, value: bytes) -> None:
        name = self._slot.next_name()
        entry = self._range(key)[0] + layout.APPENDED + name.encode()
        await self._write(key, [layout.put(entry, value)], name)

    async def delete(self, key: str) -> int:
        written = await self._write(key, [layout.delete(*self._range(key))])
        if written.responses is not None:
            return int(int(written.responses[0]["response_delete_range"].get("deleted", 0)) > 0)
        return int(bool(await self._at(key, written.revision - 1)))

    async def delete_prefix(self, prefix: str) -> None:
        start = layout.store_keys(self._root) + prefix.encode()
        await self._write(prefix, [layout.delete(start, layout.end_of(start))])

    async def claim(self, key: str, value: bytes) -> bytes:
        base, end = self._range(key)
        absent = layout.created(base, 0, end)
        work = [layout.nested([absent], [layout.put(base, value)]), layout.get(base, end)]
        written = await self._write(key, work)
        return layout.value_of(await self._after(key, written)) or b""

    async def add(self, key: str, amount: int) -> int:
        base, _ = self._range(key)
        name = self._slot.next_name()
        kind = layout.ONE if amount == 1 else layout.AMOUNT

        def each(kind: bytes) -> tuple[bytes, bytes]:
            return base + kind, layout.end_of(base + kind)

        entry = base + kind + name.encode()
        work = [
            layout.put(entry, b"%d" % amount),
            layout.get(base),
            layout.get(*each(layout.APPENDED), count_only=True),
            layout.get(*each(layout.AMOUNT)),
            layout.get(*each(layout.ONE), count_only=True),
        ]
        written = await self._write(key, work, name)
        try:
            if written.responses is not None and not layout.count(written.responses[2]):
                _, before, _, amounts, ones = written.responses
                return (
                    layout.number(layout.value_of(layout.entries(before)), base)
                    + sum(int(entry.value) for entry in layout.entries(amounts))
                    + layout.count(ones)
                )
            found = await self._at(key, written.revision, written.now)
            return layout.number(layout.value_of(found), base)
        except layout.NoNumber:
            await self._write(key, [layout.delete(entry)])
            raise

    async def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes | None:
        """Sets `key` if it is `expected` (empty: absent); its value afterwards, or `None`."""
        base, end = self._range(key)
        while True:
            found, revision = await self._entries(key)
            held = layout.value_of(found)
            if (held or b"") != expected:
                return held
            # Unchanged since that revision: nothing was written, by the first condition, nor
            # deleted, by the second: who deletes one entry of a key deletes all of them.
            if found:
                same = layout.created(found[0].key, found[0].created)
                unchanged = [layout.unchanged_since(base, end, revision), same]
            else:
                unchanged = [layout.created(base, 0, end)]
            replace = [layout.delete(base + b"\0", end), layout.put(base, value)]
            work = [layout.nested(unchanged, replace), layout.get(base, end)]
            written = await self._write(key, work)
            found = await self._after(key, written)
            held = layout.value_of(found)
            mine = any(not e.kind and e.modified == written.revision for e in found)
            if mine or (held or b"") != expected:
                return held

    async def _write(self, key: str, work: list[Json], name: str = "") -> Written:
        slot, fence = self._slot, self._fence
        name = name or slot.next_name()
        base, end = self._range(key)
        conditions = [layout.modified(slot.key, slot.revision)]
        if fence.host_key:
            conditions.append(layout.present(fence.host_key))
        body = layout.transaction(
            conditions,
            [layout.put(slot.key, name.encode(), fence.lease), *work],
            [layout.get(slot.key), layout.get(fence.host_key or slot.key), layout.get(base, end)],
        )
        try:
            answer = await call("/v3/kv/txn", body)
            if answer.get("succeeded"):
                slot.revision = layout.revision_of(answer)
                return Written(name, slot.revision, answer["responses"][1:], [])
            last, host, now = (layout.entries(response) for response in answer["responses"])
            if last and last[0].value == name.encode():
                slot.revision = last[0].modified
                return Written(name, slot.revision, None, now)
            if fence.host_key and not host:
                raise LeaseOver("the lease of this host in etcd has expired: it may not write")
            raise StoreError(f"the record of the last write of {slot.key!r} was changed in etcd")
        except Refused as e:
            slot.abandon()
            if fence.lease and e.code == NOT_FOUND:
                raise LeaseOver("the lease of this host in etcd has expired") from e
            raise StoreError(f"etcd refused a write of {key!r}: {e}") from e
        except BaseException:
            slot.abandon()
            raise

    async def _after(self, key: str, written: Written) -> list[KeyValue]:
        """The entries of `key` at the revision of a write whose last request reads them."""
        if written.responses is not None:
            return layout.entries(written.responses[-1])
        return await self._at(key, written.revision, written.now)

    async def _at(
        self, key: str, revision: int, now: list[KeyValue] | None = None
    ) -> list[KeyValue]:
        """The entries of `key` at an earlier revision. `now` are those of a later revision."""
        then = [entry for entry in now or () if entry.modified <= revision]
        if then:
            # No write since then removed an entry, because that would have removed all of them.
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
