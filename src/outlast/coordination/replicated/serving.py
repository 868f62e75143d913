"""What a leader does for the hosts: it performs their operations, and grants their leases."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from outlast.coordination.replicated.messages import Change, Requests, Written
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    WAIT,
    Operation,
    Result,
    size_bytes,
)
from outlast.coordination.replicated.quorum import Timing
from outlast.coordination.replicated.read_leases import ReadLeases, concerns_covered
from outlast.coordination.replicated.voter import Voter


class Serving:
    """Each host's writes, reads and waits, and their answers.

    Lives as long as one leader leads. Its successor learns of all that is open from the hosts,
    which send again what was not answered.
    """

    def __init__(self, voter: Voter, read_leases: ReadLeases) -> None:
        self._voter, self._read_leases = voter, read_leases
        self._gathered: deque[tuple[str, int, list[tuple[int, Operation]]]] = deque()
        self._underway: set[tuple[str, int]] = set()
        self._waits: dict[str, dict[int, str]] = {}
        self._waiters: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._answers: defaultdict[str, list[tuple[int, Result]]] = defaultdict(list)
        self._held: list[tuple[str, int, Result]] = []  # until all read leases are settled

    def take(self, host: str, requests: Requests, *, lease_valid: bool) -> None:
        """Takes the operations of a host that is in the job, when the leader's term has begun.

        A read is answered from the table without a message to the voters. That is linearizable: the
        table has all writes that any leader has answered, because the first entry of this term is
        in it, and all entries before. No later leader has answered a write, because the lease was
        valid after the read had arrived.
        """
        if requests.waits is not None:
            self._forget_waits(host, set(requests.waits))
        answers = self._voter.table.sessions[host].answers
        writes = []
        for number, operation in requests.operations:
            if operation.writes:
                if number in answers:
                    self._answer(host, number, operation, answers[number])
                elif (host, number) not in self._underway:
                    self._underway.add((host, number))
                    writes.append((number, operation))
            elif lease_valid:  # else the host sends it again
                self._look(host, number, operation)
        if writes:
            self._gathered.append((host, requests.floor, writes))

    def _look(self, host: str, number: int, operation: Operation) -> None:
        if operation.name != WAIT:
            self._answer(host, number, operation, self._voter.table.perform(operation))
        elif (value := self._voter.table.keys.get(operation.key)) is not None:
            self._answer(host, number, operation, value)
        else:
            self._waits.setdefault(host, {})[number] = operation.key
            self._waiters[operation.key].add((host, number))

    def _answer(self, host: str, number: int, operation: Operation, result: Result) -> None:
        if not self._read_leases.settled and concerns_covered(operation):
            self._held.append((host, number, result))
        else:
            self._answers[host].append((number, result))

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
                for number, operation in writes:
                    if number in results[host]:
                        self._answer(host, number, operation, results[host][number])
        for key, value in self._voter.table.appeared:
            for host, number in sorted(self._waiters.get(key, ())):
                self._answer(host, number, Operation(WAIT, key), value)
                self._forget_wait(host, number)

    def removed(self, host: str) -> None:
        self._forget_waits(host, set())
        self._waits.pop(host, None)
        self._underway = {known for known in self._underway if known[0] != host}

    def answers(self) -> Iterable[tuple[str, tuple[tuple[int, Result], ...]]]:
        """The answers since the last call, by host, and cut into messages."""
        if self._read_leases.settled:
            for host, number, result in self._held:
                self._answers[host].append((number, result))
            self._held.clear()
        taken, self._answers = self._answers, defaultdict(list)
        for host, results in taken.items():
            first = size = 0
            for number, (_, result) in enumerate(results, 1):
                size += size_bytes(result)
                if size >= MESSAGE_BYTES or number == len(results):
                    yield host, tuple(results[first:number])
                    first, size = number, 0


class HostLeases:
    """When each host was last heard, by the leader's clock.

    A host acts for `lease` after it has sent a heartbeat that was answered. The leader has received
    that heartbeat later than it was sent, and declares the host lost `lost_after` later, which is
    longer by any clock. So at that moment the host does not act any more.

    A new leader does not know what the one before has granted. It counts from its own election: by
    then the quorum lease of every leader before was over, and without it a leader grants nothing.

    Attributes:
        losing: hosts whose removal is in the log; they get no lease any more, whatever they send.
        departing: hosts that were removed, and may be voters still.
    """

    def __init__(
        self, timing: Timing, elected: float, predecessor: tuple[str, float] | None
    ) -> None:
        self._timing, self._elected, self._predecessor = timing, elected, predecessor
        self._heard: dict[str, float] = {}
        self._silent: set[str] = set()
        self._announce_due = elected
        self.losing: set[str] = set()
        self.departing: set[str] = set()

    def begin(self, hosts: list[str]) -> None:
        """The leader's term has begun, with these other hosts in the job."""
        for host in hosts:
            if host not in self._heard:
                self._heard[host] = self._elected
                self._silent.add(host)
        self._announce_due = self._elected  # at once: what they have sent before was not answered
        if self._predecessor is not None and self._predecessor[0] in self._silent:
            # The host of the leader before has its lease from its voters alone, see `Election`.
            host, heard = self._predecessor
            self._heard[host] = min(heard, self._elected)

    def admitted(self, host: str, now: float) -> None:
        if host not in self._heard:
            self._heard[host] = now
            self._silent.add(host)
            self._announce_due = now

    def hear(self, host: str, now: float) -> None:
        if host in self._heard:
            self._heard[host] = now
            self._silent.discard(host)

    def removed(self, host: str) -> None:
        self._heard.pop(host, None)
        self._silent.discard(host)

    def expired(self, now: float) -> list[tuple[str, float]]:
        """The hosts whose lease is over, each with the time since it was heard."""
        limit = now - self._timing.lost_after
        return [
            (host, now - heard)
            for host, heard in self._heard.items()
            if heard < limit and host not in self.losing
        ]

    def is_present(self, host: str, now: float) -> bool:
        recently = now < self._heard.get(host, float("-inf")) + 2.5 * self._timing.heartbeat
        return recently and host not in self._silent

    def announce_to(self, now: float) -> list[str]:
        """The hosts that have to be told who leads, now: all that have not been heard."""
        if now < self._announce_due:
            return []
        self._announce_due = now + self._timing.heartbeat
        limit = now - 2 * self._timing.heartbeat
        return [h for h, heard in self._heard.items() if h in self._silent or heard < limit]
