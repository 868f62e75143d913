"""Which voters decide together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Configuration:
    """The voters. A quorum has more than half of their total weight, so two quorums always share a
    voter.

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
        """The configuration of `voters`, with the leader as the tiebreaker if one is needed."""
        return cls(frozenset(voters), leader if len(voters) % 2 == 0 else None)

    @cached_property
    def _weights(self) -> dict[str, int]:
        return {voter: 2 if voter == self.tiebreaker else 1 for voter in sorted(self.voters)}

    @cached_property
    def _total(self) -> int:
        return sum(self._weights.values())

    def is_quorum(self, voters: Collection[str]) -> bool:
        """Whether `voters` can decide. Others among them do not count."""
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
        """All that vote."""
        return self.new.voters | (self.old.voters if self.old else frozenset())

    def is_quorum(self, voters: Collection[str]) -> bool:
        """Whether `voters` can decide."""
        return self.new.is_quorum(voters) and (self.old is None or self.old.is_quorum(voters))

    def reached_by_quorum(self, value: Callable[[str], float]) -> float:
        """The largest number that the values of a quorum all reach."""
        reached = self.new.reached_by_quorum(value)
        return reached if self.old is None else min(reached, self.old.reached_by_quorum(value))
