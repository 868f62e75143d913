"""Read leases: a host that has one knows, without a message, that nobody was told of a covered key.

A rank aborts its collectives only after it was answered that `over/k` is there, and no optimizer
may use what an abort has left in its gradients (`elastic.job.live.queued`).

The table counts the covered keys that were set. A host asks for a read lease once, by a write; from
then on every answer to its heartbeats carries that number, and renews the read lease along with the
lease of the host. The leader answers nothing that concerns a covered key until each host that has
asked has confirmed the present number, or is not in the job any more. So at a moment at which

    the number that the host knows is n, and then its read lease is not over,

nobody had been told of a covered key beyond the nth. Why this holds:

- A host confirms the number n+1 after it has made it known to its ranks, and never goes back.
- A host that does not confirm is declared lost, and only after its lease, and with it its read
  lease, is over (`serving.HostLeases`).
- A new leader finds in its table who has asked: no leader answers a heartbeat with a number before
  the write is agreed on. It counts on no confirmation that an earlier leader has got. An answer of
  the earlier leader that is still on its way renews a read lease that this leader counts on anyway.
- The leader's own host learns the number with the entry, before anything leaves the leader.

This is the read lease of "Paxos Quorum Leases" (Moraru et al., 2014) for a key that is set once.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlast.coordination.replicated.operations import BATCH, Operation
from outlast.coordination.replicated.quorum import NEVER, Timing
from outlast.coordination.replicated.table import Table, is_covered


def asking_host(key: str) -> str:
    """The host that asks for a read lease by setting this key; empty for other keys."""
    return key.rpartition("/")[2] if "/read-lease/" in key else ""


def concerns_covered(operation: Operation) -> bool:
    """Whether the result of an operation tells of a covered key."""
    parts = operation.operations if operation.name == BATCH else (operation,)
    return any(is_covered(part.key) for part in parts)


class ReadLeases:
    """What a leader knows of the read leases of the other hosts.

    Attributes:
        covered: the number of covered keys that were set.
        settled: whether all hosts with a read lease have confirmed it.
    """

    def __init__(self, me: str, timing: Timing) -> None:
        self._me, self._timing = me, timing
        self.covered = 0
        self.settled = False
        self._confirmed: dict[str, int] = {}
        self._asked: set[str] = set()
        self._behind: set[str] = set()
        self._tell_due = NEVER

    def begin(self, table: Table) -> None:
        """The leader's term has begun."""
        self._asked = {asking_host(key) for key in table.keys} & table.sessions.keys()
        self._recall(table.state.covered)

    def follow(self, table: Table) -> None:
        """Takes what the table has got, before any of its results is answered."""
        self._asked.update(
            host for key, _ in table.appeared if (host := asking_host(key)) in table.sessions
        )
        if table.state.covered != self.covered:
            self._recall(table.state.covered)

    def _recall(self, covered: int) -> None:
        self.covered, self._tell_due = covered, NEVER
        others = self._asked - {self._me}
        self._behind = {host for host in others if self._confirmed.get(host, -1) < covered}
        self.settled = not self._behind

    def granted(self, host: str) -> int | None:
        """The number with which a heartbeat is answered; `None` if the host has not asked."""
        return self.covered if host in self._asked else None

    def confirm(self, host: str, covered: int) -> None:
        if covered > self._confirmed.get(host, -1):
            self._confirmed[host] = covered
        if covered >= self.covered:
            self._drop(host)

    def removed(self, host: str) -> None:
        """It is not in the job any more: its lease is over."""
        self._asked.discard(host)
        self._drop(host)

    def _drop(self, host: str) -> None:
        if host in self._behind:
            self._behind.discard(host)
            self.settled = not self._behind

    def to_tell(self, now: float) -> Iterable[str]:
        """The hosts to be told of the present number, now: again, if they do not confirm it."""
        if self.settled or now < self._tell_due:
            return ()
        self._tell_due = now + self._timing.retry
        return sorted(self._behind)
