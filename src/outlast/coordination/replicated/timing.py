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
    """

    lease: float = 5.0
    margin: float = 0.2

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease must be positive, not {self.lease}")
        if not self.margin > 0:
            raise ValueError(f"margin must be positive, not {self.margin}")

    @property
    def lost_after(self) -> float:
        """The leader declares a host lost that it has not heard for this long."""
        return self.lease * (1 + self.margin)

    @property
    def quorum_lease(self) -> float:
        """How long a leader acts after the last time that a quorum answered it."""
        return 0.3 * self.lease

    @property
    def sticky(self) -> float:
        """A voter that has heard from a leader does not vote for another for this long."""
        return self.quorum_lease * (1 + self.margin)

    @property
    def election_spread(self) -> float:
        """Voters become candidates at random times within this span, so that one comes first."""
        return 0.15 * self.lease

    @property
    def heartbeat(self) -> float:
        """Between two heartbeats of a host, or two announcements of the leader to a host."""
        return self.lease / 10

    @property
    def append_interval(self) -> float:
        """Between two messages of the leader to a voter when there is nothing to send."""
        return self.lease / 20

    @property
    def retry(self) -> float:
        """After this long without an answer, an operation is sent again; later ones take longer."""
        return self.lease / 10
