"""The replicated state: keys, hosts, and the answers that are kept for retries.

Every voter performs the same operations in the same order, so all tables are equal. The state of a
table is a JSON value, so that a voter that lags behind gets it in one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import (
    BATCH,
    Failed,
    Operation,
    Result,
    pack_result,
    unpack_result,
)

JOINED = "hosts/joined"
LOST = "hosts/lost"
EVENTS = "hosts/events"


def event_key(number: int) -> str:
    """The key that appears with the change of the hosts number `number`, counted from 1."""
    return f"hosts/event/{number}"


@dataclass
class Session:
    """The writes of one host that were performed, so that none is performed twice.

    The host says with each message up to which number it has got all its answers (`floor`): these
    are forgotten, and a late copy of such a write is ignored. So a session holds no more answers
    than the host has writes on their way.
    """

    floor: int = 0
    answers: dict[int, Result] = field(default_factory=dict)


class Table:
    """The keys and what must survive with them.

    Attributes:
        gone: the hosts that were removed: the reason, and whether they left in order.
        appeared: keys that were set, with their values, for those that wait for them; the user
            clears it.
    """

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.sessions: dict[str, Session] = {}
        self.gone: dict[str, tuple[str, bool]] = {}
        self.appeared: list[tuple[str, bytes]] = []

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
        """Performs one operation, which is no wait."""
        name, key, keys = op.name, op.key, self.keys
        if name == "read":
            return keys.get(key)
        if name == "check":
            return int(key in keys)
        if name == "keys":
            return sorted(k for k in keys if k.startswith(key))
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
            return int(keys.pop(key, None) is not None)
        if name == "delete_prefix":
            doomed = [k for k in keys if k.startswith(key)]
            for k in doomed:
                del keys[k]
            return len(doomed)
        if name == BATCH:
            return [self.perform(part) for part in op.operations]
        raise ValueError(f"cannot perform {name!r}")

    def _add(self, op: Operation) -> Result:
        try:
            total = int(self.keys.get(op.key, b"0")) + op.amount
        except ValueError:
            return Failed(f"add: the value of {op.key!r} is not a number")
        self._set(op.key, str(total).encode())
        return total

    def _set(self, key: str, value: bytes) -> None:
        self.keys[key] = value
        self.appeared.append((key, value))

    # ------------------------------------------------------------------ the state as one value
    def pack(self) -> Any:
        """The whole state as a JSON value."""
        return {
            "keys": {key: value.decode("latin-1") for key, value in self.keys.items()},
            "gone": {host: list(said) for host, said in self.gone.items()},
            "sessions": {
                host: [s.floor, [[n, pack_result(a)] for n, a in s.answers.items()]]
                for host, s in self.sessions.items()
            },
        }

    @classmethod
    def unpack(cls, packed: Any) -> Table:
        """The reverse of `pack`."""
        table = cls()
        table.keys = {key: value.encode("latin-1") for key, value in packed["keys"].items()}
        table.gone = {host: (reason, orderly) for host, (reason, orderly) in packed["gone"].items()}
        table.sessions = {
            host: Session(floor, {n: unpack_result(a) for n, a in answers})
            for host, (floor, answers) in packed["sessions"].items()
        }
        return table
