"""The replicated state: keys, hosts, and the answers that are kept for retries.

Every voter performs the same operations in the same order, so all tables are equal. A voter that
lags behind gets a copy of the whole state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import (
    BATCH,
    Failed,
    Keys,
    Operation,
    Result,
    Single,
)

JOINED = "hosts/joined"
LOST = "hosts/lost"
EVENTS = "hosts/events"

MOST_BYTES = 128 << 20
"""Of keys and values, so that the state of a table fits into one message."""


def event_key(number: int) -> str:
    """The key that appears with the change of the hosts number `number`, counted from 1."""
    return f"hosts/event/{number}"


class Session(msgspec.Struct, array_like=True):
    """The writes of one host that were performed, so that none is performed twice.

    The host says with each message up to which number it has got all its answers (`floor`): these
    are forgotten, and a late copy of such a write is ignored. So a session holds no more answers
    than the host has writes on their way.
    """

    floor: int = 0
    answers: dict[int, Result] = {}


class TableState(msgspec.Struct):
    """All that the voters agree on.

    Attributes:
        gone: the hosts that were removed: the reason, and whether they left in order.
    """

    keys: dict[str, bytes] = {}
    sessions: dict[str, Session] = {}
    gone: dict[str, tuple[str, bool]] = {}


class Table:
    """The keys and what must survive with them.

    Attributes:
        keys, sessions, gone: see `TableState`, which is not copied.
        appeared: keys that were set, with their values, for those that wait for them; the user
            clears it.
    """

    def __init__(self, state: TableState | None = None) -> None:
        self.state = state or TableState()
        self.keys, self.sessions, self.gone = (
            self.state.keys,
            self.state.sessions,
            self.state.gone,
        )
        self.appeared: list[tuple[str, bytes]] = []
        self._size = sum(len(key) + len(value) for key, value in self.keys.items())

    # ------------------------------------------------------------------ hosts
    def join(self, info: HostInfo) -> None:
        """Admits a host, once; not one that is gone."""
        if info.id in self.sessions or info.id in self.gone:
            return
        self.sessions[info.id] = Session()
        self._record(JOINED, info.encode())

    def remove(self, host: str, reason: str, *, orderly: bool) -> None:
        """From here on, no operation of `host` is performed: this is what fences it."""
        if host in self.gone or host not in self.sessions:
            return
        del self.sessions[host]
        self.gone[host] = (reason, orderly)
        self._record(LOST, json.dumps({"id": host, "reason": reason, "orderly": orderly}))

    def _record(self, key: str, line: str) -> None:
        self._set(key, self.keys.get(key, b"") + line.encode() + b"\n")
        number = int(self.keys.get(EVENTS, b"0")) + 1
        self._set(EVENTS, str(number).encode())
        self._set(event_key(number), f"{key}\n{line}".encode())

    # ------------------------------------------------------------------ operations
    def write(
        self, host: str, floor: int, numbered: Iterable[tuple[int, Operation]]
    ) -> dict[int, Any]:
        """Performs writes of `host`, each once; returns the result of each."""
        session = self.sessions.get(host)
        if session is None:
            why = self.gone[host][0] if host in self.gone else "it has not joined"
            refusal = Failed(f"host {host} is not in the job: {why}")
            return {number: refusal for number, _ in numbered}
        if floor > session.floor:
            session.floor = floor
            for number in [n for n in session.answers if n <= floor]:
                del session.answers[number]
        results = {}
        for number, operation in numbered:
            if number <= session.floor:
                continue  # a late copy: the host has its answer
            if number not in session.answers:
                session.answers[number] = self.perform(operation)
            results[number] = session.answers[number]
        return results

    def perform(self, op: Operation) -> Result:
        """Performs one operation, which is no wait, or a batch."""
        if op.name == BATCH:
            return [self._perform_one(part) for part in op.operations]
        return self._perform_one(op)

    def _perform_one(self, op: Operation) -> Single:
        name, key, keys = op.name, op.key, self.keys
        if self._size + len(key) + len(op.value) > MOST_BYTES and op.value:
            return Failed(f"{name} of {key!r}: the store is full: it holds {self._size} bytes")
        if name == "read":
            return keys.get(key)
        if name == "check":
            return int(key in keys)
        if name == "keys":
            return Keys(tuple(sorted(k for k in keys if k.startswith(key))))
        if name == "put":
            self._set(key, op.value)
            return None
        if name == "claim":
            if key not in keys:
                self._set(key, op.value)
            return keys[key]
        if name == "append":
            self._set(key, keys.get(key, b"") + op.value)
            return None
        if name == "add":
            return self._add(op)
        if name == "compare_set":
            if keys.get(key, b"") == op.expected:
                self._set(key, op.value)
            return keys.get(key)
        if name == "delete":
            return int(self._delete(key))
        if name == "delete_prefix":
            doomed = [k for k in keys if k.startswith(key)]
            return sum(map(self._delete, doomed))
        raise ValueError(f"cannot perform {name!r}")

    def _add(self, op: Operation) -> Single:
        try:
            total = int(self.keys.get(op.key, b"0")) + op.amount
        except ValueError:
            return Failed(f"add: the value of {op.key!r} is not a number")
        if not -(1 << 63) <= total < 1 << 63:
            return Failed(f"add: the sum {total} of {op.key!r} has more than 64 bits")
        self._set(op.key, str(total).encode())
        return total

    def _delete(self, key: str) -> bool:
        value = self.keys.pop(key, None)
        self._size -= 0 if value is None else len(key) + len(value)
        return value is not None

    def _set(self, key: str, value: bytes) -> None:
        self._delete(key)
        self._size += len(key) + len(value)
        self.keys[key] = value
        self.appeared.append((key, value))
