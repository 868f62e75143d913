"""Which endpoint founds the group of a run. Pure: no clock, no sockets.

An endpoint is *fresh* while it knows of no group. It becomes a candidate when it has heard nothing
of a group for a while (a living group announces itself to the endpoints more often), no endpoint
with a lower index is fresh, and every group that the run had before is known to be over (`past`).
A candidate founds the group with the grants of a quorum of the endpoints, its own included. To ask
for a grant tells the candidate's past as well, and it is given only if all groups in it are over.

Why two groups never act at the same time:

* *Both new.* A fresh endpoint grants once, and quorums overlap. A grant is a group with one voter,
  the candidate, and is kept on disk like any other group: so the endpoint grants again only when
  that group is over (if the candidate has founded it and taken in others, when they are out too),
  or when the candidate takes the attempt back, because it saw an endpoint with a lower index.
* *One from before.* Each founding has the grants of a quorum of the endpoints, so the founder meets
  an endpoint that granted the last one. That endpoint knows the group, and does not grant until it
  is over.

A candidate may die with grants. Nothing that an endpoint can see by itself shows that the group
was not founded, or that it took nobody in: the end of a connection, even one that the candidate's
kernel has closed, also follows a handshake whose answer was lost while the candidate lives. So the
endpoints wait for news from its address, and say so. This cannot be avoided: to an endpoint, a
candidate that died before it heard of its last grant, and one that founded the group and is cut off
with it, are the same. But it is rare. A candidate first asks who *would* grant, which binds nobody,
and asks for grants only when these are a quorum: the wait for the other endpoints, which may be
long, leaves nothing behind; what remains is from the first grant to the first announcement.

What remains for two groups: endpoints that have lost the record with their disk, or have removed it
because they left the group in order. Then the older group survives when they meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from outlast.coordination.replicated.quorum import Configuration, Voters
from outlast.launch.hosts.replicated.past import Config, Group, Past
from outlast.launch.hosts.replicated.record import Record

SILENCE_S = 1.5
"""How long an endpoint listens for a living group before it may found one: if all endpoints are
fresh, have their records, and know of no group before. Otherwise as long as a host of a group may
be silent, `lost_after`: hosts that do not vote have leases until then.
"""
ANNOUNCE_S = 0.5
"""How often a living group announces itself to the endpoints."""
FIND_S = 0.25
"""How often a fresh host asks the endpoints."""
STALE_S = 1.0
"""How long an endpoint counts as fresh after it has said so."""


@dataclasses.dataclass(frozen=True)
class _Given:
    endpoint: int
    attempt: int
    host: str


class Founding:
    """The part of one endpoint.

    Args:
        lost_after_s: how long a host of a group may be silent.
        record: what it knows of earlier groups, and where its grants are kept.
    """

    def __init__(
        self, count: int, own: int, me: str, began: float, lost_after_s: float, record: Record
    ) -> None:
        names = [str(index) for index in range(count)]
        # The first endpoint breaks ties, so that it alone is enough of two.
        self._quorum = Configuration(frozenset(names), None if count % 2 else "0")
        self._count, self._own, self._me, self._began = count, own, me, began
        self._lost_after_s, self._record = lost_after_s, record
        self._fresh: dict[int, float] = {}
        self._given: _Given | None = None
        self._grants: set[int] = set()
        self._would: dict[int, float] = {}
        self.attempt = 1

    def heard_of_group(self, now: float) -> None:
        self._began = now

    def is_fresh(self, endpoint: int, now: float) -> None:
        self._fresh[endpoint] = now

    def candidate(self, now: float) -> bool:
        if self._record.past.groups:
            # Its hosts may have leases for a while after it is over, and voters alone are asked.
            self._began = max(self._began, now)
        if now < self._began + self._silence(now):
            return False
        if self._given is not None and self._given.host != self._me:
            return False
        return not self._lower(now)

    def _silence(self, now: float) -> float:
        fresh = sum(now - heard < STALE_S for heard in self._fresh.values())
        first = not self._record.past.generation  # no host can have a lease
        if first and self._record.durable and fresh == self._count - 1:
            return SILENCE_S
        return max(SILENCE_S, self._lost_after_s)

    def withdraw(self, now: float) -> None:
        """Give up the grants that this endpoint has, if one with a lower index is fresh. The others
        learn of it with what this endpoint knows of the past.
        """
        if self._lower(now) and self._given is not None and self._given.host == self._me:
            self._given = None
            self._grants.clear()
            withdrawn = Past(withdrawn={self._me: self.attempt})
            self._record.set(self._record.past.merged(withdrawn))
            self.attempt += 1

    def founds(self) -> bool:
        """Grant to itself, unless another has the grant; whether this endpoint founds the group."""
        if self._given is None:
            self._given = _Given(self._own, self.attempt, self._me)
        granted = {str(index) for index in {*self._grants, self._own}}
        return self._given.host == self._me and self._quorum.is_quorum(granted)

    def would_get(self, endpoint: int, now: float) -> bool:
        """`endpoint` would grant; whether enough do to ask for grants."""
        self._would[endpoint] = now
        return self.sure(now)

    def sure(self, now: float) -> bool:
        """Whether this candidate asks for grants, or only who would grant. Once it has one, it has
        nothing to lose.
        """
        would = {index for index, heard in self._would.items() if now - heard < STALE_S}
        named = {str(index) for index in {*would, *self._grants, self._own}}
        return bool(self._grants) or self._quorum.is_quorum(named)

    def would_grant(self, host: str, past: Past) -> bool:
        """Whether `asked` would return `True` now."""
        given = self._given
        if given is not None and given.host != host:
            return False
        return not self._record.past.without_group(host).merged(past).groups

    def asked(
        self, endpoint: int, attempt: int, host: str, address: tuple[str, int], past: Past
    ) -> bool:
        """Whether `endpoint`, the host `host`, has the grant of this one, durably."""
        given = self._given
        if given is None or (given.host == host and attempt > given.attempt):
            known = self._record.past.without_group(host).merged(past)
            if known.groups or attempt <= known.withdrawn.get(host, 0):
                return False
            config = Config(0, Voters(Configuration(frozenset([host]))))
            group = Group(host, known.generation + 1, config, (), {host: address}, attempt)
            self._record.set(known.with_group(group))
            self._given = given = _Given(endpoint, attempt, host)
        return given == _Given(endpoint, attempt, host)

    def granted(self, endpoint: int, attempt: int) -> None:
        """`endpoint` has granted; late answers to earlier attempts do not count."""
        if attempt == self.attempt:
            self._grants.add(endpoint)

    def learned(self, past: Past) -> None:
        """Another agent has told what it knows. The grant to a candidate ends with its group, or
        with the attempt.
        """
        # The grants that this endpoint has are no group as long as it has not founded it.
        known = self._record.past.merged(past).without_group(self._me)
        self._record.set(known)
        given = self._given
        if given is None or given.host == self._me:
            return
        if all(group.id != given.host for group in known.groups):
            self._given = None

    def is_enough(self, without: Set[int]) -> bool:
        """Whether the endpoints but these could found the group."""
        return self._quorum.is_quorum({str(i) for i in range(self._count) if i not in without})

    def holder(self) -> int | None:
        return None if self._given is None else self._given.endpoint

    def _lower(self, now: float) -> bool:
        return any(i < self._own and now - t < STALE_S for i, t in self._fresh.items())
