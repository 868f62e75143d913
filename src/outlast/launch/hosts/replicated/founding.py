"""Which endpoint founds the group of a run. Pure: no clock, no sockets.

An endpoint is *fresh* while it knows of no group. It becomes a candidate when it has heard nothing
of a group for a while (a living group announces itself to the endpoints more often), and no
endpoint with a lower index is fresh. A candidate founds the group with the grants of a quorum of
the endpoints, its own included.

Why two endpoints never found a group each: a fresh endpoint grants once, and quorums overlap. It
may grant again only when the first grant can no longer be used: when the candidate says that it
will not use it (it saw an endpoint with a lower index, and asks again under a new number), or when
the kernel of the candidate's host has closed its connection, i.e. its process has ended; a group
that it founded alone ended with it. A connection that merely stays silent releases nothing. What
remains is an endpoint that is restarted, and has forgotten its grant, within the moment between a
grant and the founder's first announcement, while it cannot hear the founder: the founder gives up
if it then finds another group.
"""

from __future__ import annotations

import dataclasses

from outlast.coordination.replicated.quorum import Configuration

SILENCE_S = 1.5
"""How long an endpoint listens for a living group before it may found one."""
ANNOUNCE_S = 0.5
"""How often a living group announces itself to the endpoints."""
FIND_S = 0.25
"""How often a fresh host asks the endpoints."""
STALE_S = 1.0
"""How long an endpoint counts as fresh after it has said so."""


@dataclasses.dataclass
class _Given:
    endpoint: int
    attempt: int


class Founding:
    """The part of one endpoint.

    Args:
        count: the number of endpoints.
        own: the index of this one.
        began: when it began to listen.
    """

    def __init__(self, count: int, own: int, began: float) -> None:
        names = [str(index) for index in range(count)]
        # The first endpoint breaks ties, so that it alone is enough of two.
        self._quorum = Configuration(frozenset(names), None if count % 2 else "0")
        self._own = own
        self._began = began
        self._fresh: dict[int, float] = {}
        self._given: _Given | None = None
        self._grants: set[int] = set()
        self.attempt = 1

    def heard_of_group(self, now: float) -> None:
        """There was news of a living group."""
        self._began = now

    def is_fresh(self, endpoint: int, now: float) -> None:
        """Another endpoint has said that it knows of no group."""
        self._fresh[endpoint] = now

    def candidate(self, now: float) -> bool:
        """Whether this endpoint asks for grants."""
        if now < self._began + SILENCE_S:
            return False
        if self._given is not None and self._given.endpoint != self._own:
            return False
        return not self._lower(now)

    def withdraw(self, now: float) -> int:
        """Give up the grants that this endpoint has, if one with a lower index is fresh. Returns
        the number of the attempt to withdraw, or 0.
        """
        if self._given is None or self._given.endpoint != self._own or not self._lower(now):
            return 0
        self._given = None
        self._grants.clear()
        self.attempt += 1
        return self.attempt - 1

    def founds(self) -> bool:
        """Grant to itself, unless another has the grant; whether this endpoint founds the group."""
        if self._given is None:
            self._given = _Given(self._own, self.attempt)
        granted = {str(index) for index in {*self._grants, self._own}}
        return self._given.endpoint == self._own and self._quorum.is_quorum(granted)

    def asked(self, endpoint: int, attempt: int) -> bool:
        """Whether `endpoint` has the grant of this one."""
        if self._given is None or (
            self._given.endpoint == endpoint and attempt > self._given.attempt
        ):
            self._given = _Given(endpoint, attempt)
        return self._given == _Given(endpoint, attempt)

    def granted(self, endpoint: int, attempt: int) -> None:
        """`endpoint` has granted; late answers to earlier attempts do not count."""
        if attempt == self.attempt:
            self._grants.add(endpoint)

    def released(self, endpoint: int, attempt: int | None = None) -> None:
        """`endpoint` has withdrawn all attempts up to `attempt`, or its process has ended."""
        given = self._given
        if given is None or given.endpoint != endpoint or endpoint == self._own:
            return
        if attempt is None or given.attempt <= attempt:
            self._given = None

    def holder(self) -> int | None:
        """Which endpoint has the grant of this one."""
        return None if self._given is None else self._given.endpoint

    def _lower(self, now: float) -> bool:
        return any(i < self._own and now - t < STALE_S for i, t in self._fresh.items())
