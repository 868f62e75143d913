"""All durations of the consensus, derived from the lease of a host; in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """How long things last. No time of one host is ever compared with another's; but durations
    are, so clocks may differ in rate: one second of any clock lasts at most `1 + margin` seconds
    of any other.

    The quorum lease is much shorter than a host's: when a leader dies, its voters must elect
    another, and that must renew the leases of all hosts, before any of them runs out.

    Attributes:
        lease: how long a host may act after the last heartbeat that was answered.
        margin: how much longer others wait before they rely on the end of a lease.
        quorum_share, spread_share, heartbeat_share, append_share, retry_share: of the lease.
    """

    lease: float = 5.0
    margin: float = 0.2
    quorum_share: float = 0.3
    spread_share: float = 0.15
    heartbeat_share: float = 0.1
    append_share: float = 0.05
    retry_share: float = 0.1

    @property
    def lost_after(self) -> float:
        """The leader declares a host lost that it has not heard for this long."""
        return self.lease * (1 + self.margin)

    @property
    def quorum_lease(self) -> float:
        """How long a leader acts after the last time that a quorum answered it."""
        return self.quorum_share * self.lease

    @property
    def sticky(self) -> float:
        """A voter that has heard from a leader does not vote for another for this long."""
        return self.quorum_lease * (1 + self.margin)

    @property
    def election_spread(self) -> float:
        """Voters become candidates at random times within this span, so that one comes first."""
        return self.spread_share * self.lease

    @property
    def heartbeat(self) -> float:
        """Between two heartbeats of a host, or two announcements of the leader to a host."""
        return self.heartbeat_share * self.lease

    @property
    def append_interval(self) -> float:
        """Between two messages of the leader to a voter when there is nothing to send."""
        return self.append_share * self.lease

    @property
    def retry(self) -> float:
        """After this long without an answer, an operation is sent again; later ones take longer."""
        return self.retry_share * self.lease
