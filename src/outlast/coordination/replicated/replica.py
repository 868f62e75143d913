"""One host's part in the replicated store: the only class that the host service needs."""

from __future__ import annotations

import enum
import random

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.messages import (
    Announce,
    Answers,
    Grant,
    Heartbeat,
    Leave,
    Message,
    Refusal,
    Requests,
)
from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.quorum import Configuration
from outlast.coordination.replicated.requests import OwnRequests
from outlast.coordination.replicated.table import Table
from outlast.coordination.replicated.timing import Timing


class Role(enum.Enum):
    """What a replica is at the moment."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Replica:
    """One host's part in the group.

    Drive it like this, from one thread::

        replica.receive(sender, message, now)      # for each message that has arrived
        replica.submit(operation, now)             # for each new operation
        replica.tick(now)                          # at `next_tick()` at the latest
        for receiver, message in replica.outbox(): # after any of these, once per round
            ...
        for ticket, result in replica.results():   # after `outbox`
            ...

    Args:
        me: the id of this host, unique for this process: it never comes back.
        founding: the configuration of the founder: itself. `None` for all others; they become part
            of the job when the leader calls `add_host` for them.
    """

    def __init__(
        self,
        me: str,
        timing: Timing,
        rng: random.Random,
        *,
        founding: Configuration | None,
    ) -> None:
        self.me = me
        self.timing = timing
        self.role = Role.FOLLOWER if founding is None else Role.LEADER
        self.term = 0 if founding is None else 1
        self.leader: str | None = None if founding is None else me
        # Until when this host may act, by its own clock.
        self.lease_until = float("-inf")
        # Whether this host was admitted.
        self.joined = founding is not None
        # Why this host must not act any more, for good.
        self.refused: Refusal | None = None
        self._table = Table()
        self._own = OwnRequests(timing)
        self._heard: dict[str, float] = {}
        self._waits: dict[tuple[str, int], str] = {}
        self._outbox: list[tuple[str, Message]] = []
        self._now = float("-inf")
        self._heartbeat_due = float("-inf")

    def receive(self, sender: str, message: Message, now: float) -> None:
        """Takes a message that has arrived from the host `sender`."""
        self._now = now
        if self.role is Role.LEADER:
            self._lead(sender, message)
        elif isinstance(message, Announce | Grant) and message.term >= self.term:
            if self.leader != sender:
                self.term, self.leader = message.term, sender
                self._own.send_again(now)
                self._heartbeat_due = now
            if isinstance(message, Grant):
                self.joined = True
                self.lease_until = max(self.lease_until, message.sent + self.timing.lease)
        elif isinstance(message, Answers):
            self._own.answered(message.results)
        elif isinstance(message, Refusal):
            self._refuse(message)

    def tick(self, now: float) -> None:
        """Lets time pass."""
        self._now = now
        if self.role is Role.LEADER:
            self.lease_until = now + self.timing.lease
            for host, heard in list(self._heard.items()):
                if now - heard > self.timing.lost_after:
                    self._remove(host, "its lease is over", orderly=False)
        elif self.joined and now > self.lease_until:
            self._own.fail("no quorum: the lease of this host is over")
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + self.timing.heartbeat
            if self.role is Role.LEADER:
                for host in self._heard:
                    self._outbox.append((host, Announce(self.term)))
            elif self.leader is not None and self.refused is None:
                self._outbox.append((self.leader, Heartbeat(self.term, now)))

    def next_tick(self) -> float:
        """When `tick` is due at the latest."""
        return min(self._heartbeat_due, self._own.due() if self.leader else float("inf"))

    def outbox(self) -> list[tuple[str, Message]]:
        """The messages to send, each with its receiver; taken. Ends a round."""
        if self.leader is not None and self.refused is None:
            message = self._own.message(self._now)
            if message is not None and self.leader == self.me:
                self._serve(self.me, message)
            elif message is not None:
                self._outbox.append((self.leader, message))
        taken, self._outbox = self._outbox, []
        return taken

    # ------------------------------------------------------------------ operations of this host
    def submit(self, operation: Operation, now: float) -> int:
        """Starts an operation; returns its ticket. It is performed exactly once."""
        self._now = now
        ticket = self._own.submit(operation, now)
        if self.refused is not None:
            self._own.fail(self.refused.reason)
        return ticket

    def results(self) -> list[tuple[int, Result]]:
        """The tickets of finished operations with their results; taken.

        A result may be `Failed` once the lease of this host is over; the operation may have been
        performed.
        """
        return self._own.results()

    def cancel(self, ticket: int) -> None:
        """Forgets an operation, of which there will be no result. Meant for waits: others may be
        performed all the same.
        """
        self._own.cancel(ticket)

    # ------------------------------------------------------------------ hosts
    def add_host(self, info: HostInfo, now: float) -> bool:
        """Admits a host; only the leader can. Repeat it until the host is in `hosts/joined`.

        Returns:
            Whether this replica leads.
        """
        self._now = now
        if self.role is not Role.LEADER:
            return False
        self._table.join(info)
        if info.id != self.me:
            self._heard.setdefault(info.id, now)
            self._outbox.append((info.id, Announce(self.term)))
        self._wake()
        return True

    def remove_host(self, host: str, reason: str, now: float) -> bool:
        """Declares a host lost, though its lease may not be over: only for a host whose processes
        are known to have ended. Returns whether this replica leads.
        """
        self._now = now
        if self.role is not Role.LEADER:
            return False
        self._remove(host, reason, orderly=False)
        return True

    def leave(self, reason: str, now: float) -> None:
        """Leaves in order. Call it when all workers of this host have ended. `refused` is set, with
        `orderly`, when the others know; only then may this process end without a delay for them.
        """
        self._now = now
        if self.role is Role.LEADER:
            self._refuse(Refusal(reason, orderly=True))
        elif self.leader is not None:
            self._outbox.append((self.leader, Leave(reason)))

    # ------------------------------------------------------------------ the leader
    def _lead(self, sender: str, message: Message) -> None:
        if sender in self._table.gone:
            self._outbox.append((sender, Refusal(self._table.gone[sender])))
        elif sender not in self._heard:
            return
        elif isinstance(message, Heartbeat):
            self._heard[sender] = self._now
            self._outbox.append((sender, Grant(self.term, message.sent)))
        elif isinstance(message, Requests):
            self._serve(sender, message)
        elif isinstance(message, Leave):
            self._remove(sender, message.reason, orderly=True)
            self._outbox.append((sender, Refusal(message.reason, orderly=True)))

    def _serve(self, host: str, message: Requests) -> None:
        results: list[tuple[int, Result]] = []
        if message.waits is not None:
            for known in [w for w in self._waits if w[0] == host and w[1] not in message.waits]:
                del self._waits[known]
        writes = []
        for number, operation in message.operations:
            if operation.writes:
                writes.append((number, operation))
            elif operation.name == "wait_for":
                self._waits[host, number] = operation.key
            else:
                results.append((number, self._table.perform(operation)))
        results += self._table.write(host, message.floor, writes).items()
        self._answer(host, tuple(results))
        self._wake()

    def _answer(self, host: str, results: tuple[tuple[int, Result], ...]) -> None:
        if host == self.me:
            self._own.answered(results)
        elif results:
            self._outbox.append((host, Answers(results)))

    def _wake(self) -> None:
        self._table.appeared.clear()
        for (host, number), key in list(self._waits.items()):
            if key in self._table.keys:
                del self._waits[host, number]
                self._answer(host, ((number, self._table.keys[key]),))

    def _remove(self, host: str, reason: str, *, orderly: bool) -> None:
        self._heard.pop(host, None)
        self._table.remove(host, reason, orderly=orderly)
        self._wake()

    def _refuse(self, refusal: Refusal) -> None:
        self.refused = refusal
        self.lease_until = float("-inf")
        self._own.fail(refusal.reason)
