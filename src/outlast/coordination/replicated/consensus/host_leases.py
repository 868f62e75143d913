"""The leases that a leader grants to hosts, and which hosts are lost."""

from __future__ import annotations

from outlast.coordination.replicated.timing import Timing


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
        self._timing = timing
        self._elected = elected
        self._predecessor = predecessor
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
        if self._predecessor is not None and self._predecessor[0] in self._silent:
            # The host of the leader before has its lease from its voters alone, see `Election`.
            host, heard = self._predecessor
            self._heard[host] = min(heard, self._elected)

    def admitted(self, host: str, now: float) -> None:
        """A new host is in the table."""
        if host not in self._heard:
            self._heard[host] = now
            self._silent.add(host)
            self._announce_due = now

    def hear(self, host: str, now: float) -> None:
        """A heartbeat has arrived from a host in the job."""
        if host in self._heard:
            self._heard[host] = now
            self._silent.discard(host)

    def removed(self, host: str) -> None:
        """Forgets a host that is gone."""
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
        """Whether a host was heard recently."""
        heard = self._heard.get(host)
        return (
            heard is not None
            and host not in self._silent
            and now < heard + 2.5 * self._timing.heartbeat
        )

    def announce_to(self, now: float) -> list[str]:
        """The hosts that have to be told who leads, now: all that have not been heard."""
        if now < self._announce_due:
            return []
        self._announce_due = now + self._timing.heartbeat
        limit = now - 2 * self._timing.heartbeat
        return [h for h, heard in self._heard.items() if h in self._silent or heard < limit]
