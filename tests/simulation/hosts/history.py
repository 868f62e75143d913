"""What the hosts have asked of the store and been answered, compared with a plain model of it."""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.coordination.replicated.messages import Change, Written
from outlast.coordination.replicated.operations import Failed, Operation, Result

FOREVER = float("inf")


@dataclass
class Call:
    """One operation: asked at `start`, answered at `end`, by the one true clock."""

    host: str
    number: int
    operation: Operation
    start: float
    end: float = FOREVER
    result: Result = None
    failed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has a result, or has failed."""
        return self.failed or self.end < FOREVER


class Model:
    """What the store must be: performs the agreed changes one by one.

    It is written without looking at `Table`, for the operations that the simulation uses. It
    records the versions of each key, and the position and the result of each write.
    """

    def __init__(self) -> None:
        self.position = 0
        self.keys: dict[str, bytes] = {}
        self.versions: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self.written: dict[tuple[str, int], tuple[int, Result]] = {}
        self.hosts: set[str] = set()
        self.gone: set[str] = set()
        self.covered: dict[str, int] = {}  # the keys of ends, by their order
        self._chained = 0
        self._floors: Counter[str] = Counter()

    def perform(self, change: Change) -> None:
        if isinstance(change, HostJoined):
            host = change.info.id
            if host not in self.hosts | self.gone:
                self.hosts.add(host)
                info = msgspec.to_builtins(change.info)
                self._chain({"do": "host joined", "info": info})
        elif isinstance(change, HostLost):
            if change.host in self.hosts:
                self.hosts.discard(change.host)
                self.gone.add(change.host)
                self._chain(
                    {
                        "do": "host lost",
                        "host": change.host,
                        "reason": change.reason,
                        "left": change.left,
                    }
                )
        elif isinstance(change, Written):
            for host, floor, numbered in change.by_host:
                self._floors[host] = max(self._floors[host], floor)
                for number, operation in numbered:
                    over = number <= self._floors[host]  # answered, or given up by the host
                    if host in self.hosts and not over and (host, number) not in self.written:
                        self.position += 1
                        result = self._write(operation)
                        self.written[host, number] = (self.position, result)

    def free_entry(self) -> str:
        """The key of the next entry of the chain."""
        while (key := f"chain/{self._chained + 1}") in self.keys:
            self._chained += 1
        return key

    def _chain(self, entry: dict[str, Any]) -> None:
        self.keys[self.free_entry()] = json.dumps(entry, separators=(",", ":")).encode()

    def _write(self, op: Operation) -> Result:
        before = self.keys.get(op.key, b"")
        after, result = before, None  # type: tuple[bytes, Result]
        if op.name == "add":
            after = b"%d" % (int(before or b"0") + op.amount)
            result = int(after)
        elif op.name == "append":
            after = before + op.value
        elif op.name == "claim":
            after = result = before or op.value
        elif op.name == "compare_set":
            after = op.value if before == op.expected else before
            result = after or None
        elif op.name == "put":
            after = op.value
        if after != before:
            self.keys[op.key] = after
            if "/over/" in op.key:
                self.covered.setdefault(op.key, len(self.covered) + 1)
            self.versions[op.key].append((self.position, after))
        return result


def check(calls: list[Call], model: Model) -> list[str]:
    """What is wrong, if anything: the calls must be linearizable.

    The writes have one order, that of the log. It must agree with real time: a write that was asked
    after another was answered comes later. Each result must be the one that the model gave at that
    place. And each read must have a place in that order, not before a write or a read that was
    answered before it was asked, nor behind a write that was asked after it was answered.
    """
    broken: list[str] = []
    writes: list[tuple[int, Call]] = []
    for call in calls:
        if not call.operation.writes:
            continue
        place, result = model.written.get((call.host, call.number), (0, None))
        if place:
            writes.append((place, call))
        answered = call.end < FOREVER and not isinstance(call.result, Failed)
        if answered and not place:
            broken.append(f"answered, and not performed: {call}")
        elif answered and call.result != result:
            broken.append(f"answered {call.result!r} instead of {result!r}: {call}")
    writes.sort(key=lambda write: write[0])
    latest: Call | None = None
    for _, call in writes:
        if latest is not None and call.end < latest.start:
            broken.append(f"performed after a later one: {call}; {latest}")
        if latest is None or call.start > latest.start:
            latest = call
    return broken + _check_reads(calls, writes, model)


def _check_reads(calls: list[Call], writes: list[tuple[int, Call]], model: Model) -> list[str]:
    broken: list[str] = []
    reads = [
        call
        for call in calls
        if not call.operation.writes
        and call.end < FOREVER
        and not isinstance(call.result, Failed)
        and not call.operation.key.startswith("chain/")
    ]
    by_end = sorted((call.end, place) for place, call in writes)
    placed: list[tuple[float, int]] = []
    for read in sorted(reads, key=lambda call: call.end):
        first = max((place for end, place in by_end if end < read.start), default=0)
        first = max([first, *(place for end, place in placed if end < read.start)])
        last = min((p for p, call in writes if call.start > read.end), default=model.position + 1)
        place = _place(read, model.versions[read.operation.key], first, last)
        if place is None:
            broken.append(f"no such value at that time: {read}")
        else:
            placed.append((read.end, place))
    return broken


def _place(read: Call, versions: list[tuple[int, bytes]], first: int, last: int) -> int | None:
    """The earliest place of a read: behind the write `first`, before `last`."""
    at = bisect.bisect_right(versions, first, key=lambda version: version[0])
    value = versions[at - 1][1] if at else None
    if value == read.result and (value is not None or read.operation.name != "wait_for"):
        return first
    for place, value in versions[at:]:
        if place < last and value == read.result:
            return place
    return None
