"""This host as a member of the job: its lease, and its operations, whoever leads."""

from __future__ import annotations

from outlast.coordination.replicated.messages import (
    Announce,
    Answers,
    Grant,
    Heartbeat,
    Leave,
    Message,
    Refusal,
)
from outlast.coordination.replicated.operations import Operation
from outlast.coordination.replicated.requests import OwnRequests
from outlast.coordination.replicated.timing import Timing


class OwnHost:
    """Keeps the lease of this host, and sends its operations to the leader.

    Attributes:
        leader, term: the leader that this host knows, and its term.
        until: until when this host may act.
        joined: whether this host had a lease at any time.
        refused: why this host must not act any more, for good.
    """

    def __init__(self, me: str, timing: Timing, *, founder: bool) -> None:
        self.me = me
        self.leader: str | None = None
        self.term = 0
        self.until = float("-inf")
        self.joined = founder
        self.refused: Refusal | None = None
        self.requests = OwnRequests(timing)
        self._timing = timing
        self._heartbeat_due = float("-inf")
        self._leaving: str | None = None
        self._heard = float("-inf")

    def submit(self, operation: Operation, now: float) -> int:
        """Starts an operation; it fails at once if the lease is over."""
        ticket = self.requests.submit(operation, now)
        self.check_lease(now)
        return ticket

    def leave(self, reason: str) -> None:
        """Tells the leader, from now on until it answers."""
        self._leaving = reason
        self._heartbeat_due = float("-inf")

    def receive(self, sender: str, message: Message, voter_term: int, now: float) -> None:
        """Takes a message of a leader to this host.

        `voter_term`: a candidate enters a term of its own, and from then on does not accept the
        lease of an earlier leader. So the lease that the host of a leader had before was asked for
        before its election began, which `Election.predecessor_heard` relies on.
        """
        if isinstance(message, Refusal):
            self.refuse(message)
        elif isinstance(message, Answers):
            self.requests.answered(message.results)
        elif isinstance(message, Announce | Grant) and message.term >= max(self.term, voter_term):
            self.follow(sender, message.term, now)
            self._heard = now
            if isinstance(message, Grant):
                self.extend(message.sent)

    def follow(self, leader: str, term: int, now: float) -> None:
        """Knows the leader of a term, which has begun."""
        if self.term < term:
            self.leader, self.term = leader, term
            self.requests.send_again(now)
            self._heartbeat_due = float("-inf")

    def extend(self, heard: float) -> None:
        """The lease counts from `heard`."""
        if self.refused is None:
            self.joined = True
            self.until = max(self.until, heard + self._timing.lease)

    def refuse(self, refusal: Refusal) -> None:
        """This host is not in the job any more."""
        if self.refused is None:
            self.refused = refusal
        self.until = float("-inf")
        self.requests.fail(f"host {self.me} is not in the job any more: {self.refused.reason}")

    def is_out_of_touch(self, now: float) -> bool:
        """Whether the leader has not been heard for some heartbeats."""
        return now > self._heard + 3 * self._timing.heartbeat

    def check_lease(self, now: float) -> None:
        """Fails all operations when this host must not act."""
        if self.refused is not None:
            self.refuse(self.refused)
        elif self.joined and now >= self.until > float("-inf"):
            self.requests.fail(
                f"host {self.me} has had no answer from a leader with a quorum of the voters for "
                f"{self._timing.lease} s: its lease is over"
            )

    def due(self) -> float:
        """When there is something to send."""
        if self.leader is None or self.refused is not None:
            return float("inf")
        return min(self._heartbeat_due, self.requests.due())

    def messages(self, now: float) -> list[Message]:
        """What is to be sent to the leader now."""
        if self.leader is None or self.refused is not None:
            return []
        sending: list[Message] = []
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + self._timing.heartbeat
            sending.append(
                Heartbeat(self.term, now) if self._leaving is None else Leave(self._leaving)
            )
        message = self.requests.message(now)
        return sending if message is None else [*sending, message]
