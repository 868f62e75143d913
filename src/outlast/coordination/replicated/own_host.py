"""This host as a member: its lease, and its operations, each repeated until it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.coordination.replicated import messages as msg
from outlast.coordination.replicated.operations import (
    MESSAGE_BYTES,
    WAIT,
    Failed,
    Operation,
    Result,
    size_bytes,
)
from outlast.coordination.replicated.quorum import NEVER, Timing


@dataclass
class _Open:
    operation: Operation
    due: float
    delay: float


class OwnRequests:
    """Numbers the operations, repeats them, and collects their results.

    An operation keeps its number for all repetitions. The table performs each number once
    (`table.Session`), also if the leader changes between two of them.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next = 1
        self._open: dict[int, _Open] = {}
        self._results: list[tuple[int, Result]] = []
        self._tell_waits = False

    def submit(self, operation: Operation, now: float) -> int:
        """Returns the number of the operation, which is sent with the next message."""
        number = self._next
        self._next += 1
        self._open[number] = _Open(operation, now, self._timing.retry)
        return number

    def cancel(self, number: int) -> None:
        """Forgets an operation. The leader learns which waits there still are."""
        dropped = self._open.pop(number, None)
        if dropped is not None and dropped.operation.name == WAIT:
            self._tell_waits = True

    def answered(self, results: tuple[tuple[int, Result], ...]) -> None:
        """Takes the answers of the leader; repeated ones are ignored."""
        for number, result in results:
            if self._open.pop(number, None) is not None:
                self._results.append((number, result))

    def fail(self, reason: str) -> None:
        """Gives up all operations. They may have been performed."""
        self._results += [(number, Failed(reason)) for number in self._open]
        self._open.clear()

    def results(self) -> list[tuple[int, Result]]:
        taken, self._results = self._results, []
        return taken

    def send_again(self, now: float) -> None:
        """A new leader: it knows of no waits, and may not have what was sent to the one before."""
        for pending in self._open.values():
            pending.due, pending.delay = now, self._timing.retry
        self._tell_waits = True

    def due(self) -> float:
        """When `message` has something to send."""
        if self._tell_waits:
            return NEVER
        return min((pending.due for pending in self._open.values()), default=float("inf"))

    def message(self, now: float) -> msg.Requests | None:
        if self.due() > now:
            return None
        sending, waits, floor = [], [], self._next - 1
        size = 0
        tell = self._tell_waits
        for number, pending in self._open.items():
            operation = pending.operation
            if operation.name == WAIT:
                waits.append(number)
            elif operation.writes:
                floor = min(floor, number - 1)
            if pending.due <= now and size < MESSAGE_BYTES:  # the rest stays due
                size += size_bytes(operation)
                sending.append((number, operation))
                if operation.name == WAIT:
                    # The leader keeps it. It is repeated rarely, in case that the answer was lost.
                    pending.delay = self._timing.lease / 2
                    tell = True
                pending.due = now + pending.delay
                # A leader that has much to do gets no more to do by repetitions.
                pending.delay = min(2 * pending.delay, self._timing.lease)
        self._tell_waits = False
        return msg.Requests(floor, tuple(sending), tuple(waits) if tell else None)


class OwnHost:
    """Keeps the lease of this host, and sends its operations to the leader.

    Attributes:
        leader, term: the leader that this host knows, and its term.
        until: until when this host may act, by its own clock. It may have passed, and may be
            extended again, as long as the host is not `refused`.
        covered, reads_until: the read lease: the number of covered keys that this host knows, and
            until when nobody is told of a further one, see `read_leases`. The ranks must be able to
            see both before anything that the node's `outbox` or `results` has returned leaves the
            host.
        joined: whether this host had a lease at any time.
        refused: why this host must not act any more, for good.
    """

    def __init__(self, me: str, timing: Timing, *, founder: bool) -> None:
        self.me = me
        self.leader: str | None = None
        self.term = 0
        self.until = NEVER
        self.covered, self.reads_until = 0, NEVER
        self.joined = founder
        self.refused: msg.Refusal | None = None
        self.requests = OwnRequests(timing)
        self._timing = timing
        self._heartbeat_due = NEVER
        self._leaving: str | None = None
        self._heard = NEVER

    def submit(self, operation: Operation, now: float) -> int:
        """Starts an operation; it fails at once if the lease is over."""
        ticket = self.requests.submit(operation, now)
        self.check_lease(now)
        return ticket

    def leave(self, reason: str) -> None:
        self._leaving = reason
        self._heartbeat_due = NEVER

    def receive(self, sender: str, message: msg.Message, voter_term: int, now: float) -> None:
        """Takes a message of a leader to this host.

        `voter_term`: a candidate enters a term of its own, and from then on does not accept the
        lease of an earlier leader. So the lease that the host of a leader had before was asked for
        before its election began, which `Election.predecessor_heard` relies on.
        """
        if isinstance(message, msg.Refusal):
            self.refuse(message)
        elif isinstance(message, msg.Answers):
            self.requests.answered(message.results)
        elif isinstance(message, msg.Recall):
            self.learn(message.covered)
            self._heartbeat_due = NEVER
        elif isinstance(message, msg.Announce | msg.Grant) and message.term >= max(
            self.term, voter_term
        ):
            self.follow(sender, message.term, now)
            self._heard = now
            if isinstance(message, msg.Grant):
                self.extend(message.sent, message.covered)

    def follow(self, leader: str, term: int, now: float) -> None:
        """Follows the leader of a term, which has begun."""
        if self.term < term:
            self.leader, self.term = leader, term
            self.requests.send_again(now)
            self._heartbeat_due = NEVER

    def extend(self, heard: float, covered: int | None) -> None:
        """The lease counts from `heard`; with `covered`, the read lease too."""
        if self.refused is None:
            self.joined = True
            self.until = max(self.until, heard + self._timing.lease)
            if covered is not None:
                if covered > self.covered:
                    self._heartbeat_due = NEVER  # which confirms it
                self.learn(covered)
                self.reads_until = self.until

    def learn(self, covered: int) -> None:
        self.covered = max(self.covered, covered)

    def refuse(self, refusal: msg.Refusal) -> None:
        """This host is not in the job any more."""
        if self.refused is None:
            self.refused = refusal
        self.until = self.reads_until = NEVER
        self.requests.fail(f"host {self.me} is not in the job any more: {self.refused.reason}")

    def is_out_of_touch(self, now: float) -> bool:
        """Whether the leader has not been heard for some heartbeats."""
        return now > self._heard + 3 * self._timing.heartbeat

    def check_lease(self, now: float) -> None:
        """Fails all operations when this host must not act."""
        if self.refused is not None:
            self.refuse(self.refused)
        elif self.joined and now >= self.until > NEVER:
            self.requests.fail(
                f"host {self.me} has had no answer from a leader with a quorum of the voters for "
                f"{self._timing.lease} s: its lease is over"
            )

    def due(self) -> float:
        if self.leader is None or self.refused is not None:
            return float("inf")
        return min(self._heartbeat_due, self.requests.due())

    def messages(self, now: float) -> list[msg.Message]:
        if self.leader is None or self.refused is not None:
            return []
        sending: list[msg.Message] = []
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + self._timing.heartbeat
            leaving, beat = self._leaving, msg.Heartbeat(now, self.covered)
            sending.append(beat if leaving is None else msg.Leave(leaving))
        message = self.requests.message(now)
        return sending if message is None else [*sending, message]
