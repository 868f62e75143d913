"""Which rank's process holds the copies of which rank: never one in the same failure domain.

The failure domains form a ring, in the order of their lowest ranks, and each domain's copies are in
the next one. So a domain holds the copies of one other domain only, and what it sends and receives
does not grow with the number of hosts. Copies and originals are both lost only with two neighbors
of the ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, and the failure domain (a rack, say) that the host is in."""

    host: str
    domain: str


def holders(places: Sequence[Place]) -> list[int] | None:
    """The rank that holds the copies of each rank; `None` if all ranks are in one failure domain.

    Raises:
        ValueError: if a host is in two failure domains.
    """
    domain_of: dict[str, tuple[str, int]] = {}
    ranks_in: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        known, first = domain_of.setdefault(place.host, (place.domain, rank))
        if known != place.domain:
            raise ValueError(
                f"ranks {first} and {rank} are both on host {place.host}, but OUTLAST_FAILURE_"
                f"DOMAIN is {known!r} for one and {place.domain!r} for the other: set it to one "
                "value on each host"
            )
        ranks_in.setdefault(place.domain, []).append(rank)
    if len(ranks_in) < 2:
        return None
    found = [-1] * len(places)
    ring = list(ranks_in.values())
    for ranks, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        for number, rank in enumerate(ranks):
            found[rank] = following[number % len(following)]
    return found
