"""The place of one host's workers in the job: their ranks, and the store that they use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a host in one attempt. The ranks of one host are consecutive.

    Attributes:
        store: host and port of the store: `MASTER_ADDR` and `MASTER_PORT`.
        place: of this host, from 0.
        places: the number of places at the start of the attempt, which gives `WORLD_SIZE`.
        attempt: number of restarts of all workers so far.
        taken_over: how many hosts had this place before in this attempt. If not 0, the workers are
            replacements, and join the running call.
        variables: further environment variables of the workers.
    """

    store: tuple[str, int]
    place: int = 0
    places: int = 1
    attempt: int = 0
    taken_over: int = 0
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def ranks(self, nproc: int) -> range:
        """The ranks of this host's workers."""
        return range(self.place * nproc, (self.place + 1) * nproc)
