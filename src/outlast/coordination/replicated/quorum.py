"""Which voters decide together, and how long things last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

NEVER = float("-inf")


@dataclass(frozen=True)
class Configuration:
    """The voters. A quorum has more than half of their weight, so two quorums share a voter.

    Each voter weighs 1. If their number is even, one of them, the tiebreaker, weighs 2: of two
    halves exactly one can go on. Of two voters, the tiebreaker goes on alone, and the other stops
    when the tiebreaker is lost.
    """

    voters: frozenset[str]
    tiebreaker: str | None = None

    def __post_init__(self) -> None:
        if not self.voters:
            raise ValueError("a configuration needs at least one voter")
        even = len(self.voters) % 2 == 0
        if even != (self.tiebreaker is not None):
            raise ValueError(
                f"an even number of voters needs a tiebreaker, an odd number has none; "
                f"got {len(self.voters)} voters and the tiebreaker {self.tiebreaker!r}"
            )
        if self.tiebreaker is not None and self.tiebreaker not in self.voters:
            raise ValueError(f"the tiebreaker {self.tiebreaker!r} is not a voter")

    @classmethod
    def led_by(cls, leader: str, voters: Collection[str]) -> Configuration:
        return cls(frozenset(voters), leader if len(voters) % 2 == 0 else None)

    @cached_property
    def _weights(self) -> dict[str, int]:
        return {voter: 2 if voter == self.tiebreaker else 1 for voter in sorted(self.voters)}

    @cached_property
    def _total(self) -> int:
        return sum(self._weights.values())

    def is_quorum(self, voters: Collection[str]) -> bool:
        return 2 * sum(self._weights.get(voter, 0) for voter in set(voters)) > self._total

    def reached_by_quorum(self, value: Callable[[str], float]) -> float:
        """The largest number that the values of a quorum all reach."""
        values = [(value(voter), weight) for voter, weight in self._weights.items()]
        values.sort(reverse=True)
        weights = 0
        for reached, weight in values:
            weights += weight
            if 2 * weights > self._total:
                return reached
        raise AssertionError("all voters together are a quorum")


@dataclass(frozen=True)
class Voters:
    """The configuration in force, and during a change also the one before.

    Why a change passes through a joint phase: while some voters know the new configuration and some
    do not, a quorum of the old one and a quorum of the new one may have no voter in common, and
    could elect two leaders. In the joint phase a decision needs a quorum of each. A voter that
    decides by the old configuration alone has not seen the joint entry; had that entry been
    committed, a quorum of the old configuration would have it, and the election would have met one
    of them. A voter that decides by the new configuration alone has seen the joint entry committed.
    So quorums of neighboring phases always share a voter, and phases that are not neighbors are
    never in use at the same time.
    """

    new: Configuration
    old: Configuration | None = None

    @property
    def all(self) -> frozenset[str]:
        return self.new.voters | (self.old.voters if self.old else frozenset())

    def is_quorum(self, voters: Collection[str]) -> bool:
        return self.new.is_quorum(voters) and (self.old is None or self.old.is_quorum(voters))

    def reached_by_quorum(self, value: Callable[[str], float]) -> float:
        reached = self.new.reached_by_quorum(value)
        return reached if self.old is None else min(reached, self.old.reached_by_quorum(value))


@dataclass(frozen=True)
class Timing:
    """All durations of the consensus, in seconds, derived from the lease of a host. No time of one
    host is ever compared with another's; but durations are, so clocks may differ in rate: one
    second of any clock lasts at most `1 + margin` seconds of any other.

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
