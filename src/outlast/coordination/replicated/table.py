"""The replicated state: keys, hosts, and the answers that are kept for retries.

Every voter performs the same operations in the same order, so all tables are equal. A voter that
lags behind gets a copy of the whole state.

The *chain* is a part of the keys: its entries are numbered from 1, each has a key of its own, and
none is ever changed. The table adds an entry for each host that joins or is removed. All other
entries are decisions of the launchers, which claim the next number. So all hosts, the voters or
not, see hosts and decisions in one order, and wait for one key at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from outlast.coordination.replicated.hosts import ChainEntry, HostJoined, HostLost
from outlast.coordination.replicated.operations import (
    BATCH,
    Failed,
    Keys,
    Operation,
    Result,
    Single,
)

FULL_BYTES = 128 << 20
"""Of keys and values, so that the state of a table fits into one message."""


def is_covered(key: str) -> bool:
    """Whether a key is covered by read leases, see `read_leases`."""
    return "/over/" in key


def entry_key(number: int) -> str:
    """The key of an entry of the chain."""
    return f"chain/{number}"


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
        gone: the hosts that were removed.
        chained: no entry of the chain before this one is free.
        covered: how many covered keys were set, see `read_leases`.
    """

    keys: dict[str, bytes] = {}
    sessions: dict[str, Session] = {}
    gone: dict[str, HostLost] = {}
    chained: int = 1
    covered: int = 0


class Table:
    """The keys and what must survive with them.

    Attributes:
        keys, sessions, gone: see `TableState`, which is not copied.
        appeared: keys that were set, with their values, for their waits; the user clears it.
    """

    def __init__(self, state: TableState | None = None) -> None:
        self.state = state = state or TableState()
        self.keys, self.sessions, self.gone = state.keys, state.sessions, state.gone
        self.appeared: list[tuple[str, bytes]] = []
        self._size = sum(len(key) + len(value) for key, value in self.keys.items())

    # ------------------------------------------------------------------ hosts
    def join(self, joined: HostJoined) -> None:
        """Admits a host, once; not one that is gone."""
        if joined.info.id not in self.sessions and joined.info.id not in self.gone:
            self.sessions[joined.info.id] = Session()
            self._extend_chain(joined)

    def remove(self, lost: HostLost) -> None:
        """From here on, no operation of the host is performed: this is what fences it."""
        if lost.host not in self.gone and lost.host in self.sessions:
            del self.sessions[lost.host]
            self.gone[lost.host] = lost
            self._extend_chain(lost)

    def _extend_chain(self, entry: ChainEntry) -> None:
        while (key := entry_key(self.state.chained)) in self.keys:
            self.state.chained += 1
        self._set(key, entry.encode())

    # ------------------------------------------------------------------ operations
    def write(
        self, host: str, floor: int, numbered: Iterable[tuple[int, Operation]]
    ) -> dict[int, Any]:
        """Performs writes of `host`, each once; returns the result of each."""
        session = self.sessions.get(host)
        if session is None:
            why = self.gone[host].reason if host in self.gone else "it has not joined"
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
        if op.name == BATCH:
            return [self._perform_one(part) for part in op.operations]
        return self._perform_one(op)

    def _perform_one(self, op: Operation) -> Single:
        name, key, keys = op.name, op.key, self.keys
        if self._size + len(key) + len(op.value) > FULL_BYTES and op.value:
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
            return sum(map(self._delete, [k for k in keys if k.startswith(key)]))
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
        if not self._delete(key) and is_covered(key):
            self.state.covered += 1
        self._size += len(key) + len(value)
        self.keys[key] = value
        self.appeared.append((key, value))
