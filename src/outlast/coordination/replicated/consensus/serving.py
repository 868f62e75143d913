"""The leader's side of operations: each host's writes, reads and waits, and their answers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from outlast.coordination.replicated.consensus.voter import Voter
from outlast.coordination.replicated.entries import Change, Written
from outlast.coordination.replicated.messages import Requests
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    WAIT,
    Operation,
    Result,
    size_bytes,
)


class Serving:
    """Lives as long as one leader leads. Its successor learns of all that is open from the hosts,
    which send again what was not answered.
    """

    def __init__(self, voter: Voter) -> None:
        self._voter = voter
        self._gathered: deque[tuple[str, int, list[tuple[int, Operation]]]] = deque()
        self._underway: set[tuple[str, int]] = set()
        self._waits: dict[str, dict[int, str]] = {}
        self._waiters: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._answers: defaultdict[str, list[tuple[int, Result]]] = defaultdict(list)

    def take(self, host: str, said: Requests, *, lease_valid: bool) -> None:
        """Takes the operations of a host that is in the job, when the leader's term has begun.

        A read is answered from the table without a message to the voters. That is linearizable: the
        table has all writes that any leader has answered, because the first entry of this term is
        in it, and all entries before. No later leader has answered a write, because the lease was
        valid after the read had arrived.
        """
        if said.waits is not None:
            self._forget_waits(host, set(said.waits))
        answers = self._voter.table.sessions[host].answers
        writes = []
        for number, operation in said.operations:
            if operation.writes:
                if number in answers:
                    self._answers[host].append((number, answers[number]))
                elif (host, number) not in self._underway:
                    self._underway.add((host, number))
                    writes.append((number, operation))
            elif lease_valid:  # else the host sends it again
                self._look(host, number, operation)
        if writes:
            self._gathered.append((host, said.floor, writes))

    def _look(self, host: str, number: int, operation: Operation) -> None:
        if operation.name != WAIT:
            self._answers[host].append((number, self._voter.table.perform(operation)))
        elif (value := self._voter.table.keys.get(operation.key)) is not None:
            self._answers[host].append((number, value))
        else:
            self._waits.setdefault(host, {})[number] = operation.key
            self._waiters[operation.key].add((host, number))

    def _forget_waits(self, host: str, kept: set[int]) -> None:
        waits = self._waits.get(host, {})
        for number in [n for n in waits if n not in kept]:
            self._forget_wait(host, number)

    def _forget_wait(self, host: str, number: int) -> None:
        key = self._waits[host].pop(number)
        self._waiters[key].discard((host, number))
        if not self._waiters[key]:
            del self._waiters[key]

    def gathered(self) -> Written | None:
        """Writes that no entry of the log holds yet, as one: all of them, unless they are long."""
        taken, size = [], 0
        while self._gathered and size < MESSAGE_BYTES:
            host, floor, writes = self._gathered.popleft()
            taken.append((host, floor, tuple(writes)))
            size += sum(size_bytes(operation) for _, operation in writes)
        return Written(tuple(taken)) if taken else None

    def performed(self, change: Change, results: dict[str, dict[int, Any]]) -> None:
        """The results of an entry, each of which is answered; and the keys that it has set, whose
        waits are answered. An applied entry is agreed on, so this needs no lease.
        """
        if isinstance(change, Written):
            for host, _, writes in change.by_host:
                self._underway.difference_update((host, number) for number, _ in writes)
        for host, numbered in results.items():
            for number, result in numbered.items():
                self._answers[host].append((number, result))
        for key, value in self._voter.table.appeared:
            for host, number in sorted(self._waiters.get(key, ())):
                self._answers[host].append((number, value))
                self._forget_wait(host, number)

    def removed(self, host: str) -> None:
        """Forgets a host that is gone."""
        self._forget_waits(host, set())
        self._waits.pop(host, None)
        self._underway = {known for known in self._underway if known[0] != host}

    def answers(self) -> Iterable[tuple[str, tuple[tuple[int, Result], ...]]]:
        """The answers since the last call, by host, and cut into messages."""
        taken, self._answers = self._answers, defaultdict(list)
        for host, results in taken.items():
            first = size = 0
            for number, (_, result) in enumerate(results, 1):
                size += size_bytes(result)
                if size >= MESSAGE_BYTES or number == len(results):
                    yield host, tuple(results[first:number])
                    first, size = number, 0
