"""What an agent knows of the groups that its run has had, and whether one of them may still act.

A group acts only with a quorum of its voters. So it is *over* when so many of them can never vote
again that those which are left are no quorum. Two things must be known for that:

* Which voters are out: their process has said so, or their address is answered by a process with
  another id. An id never comes back. Silence proves nothing.
* Who the voters are: a group may have changed them since this agent was last in it. But each change
  needs a quorum of the voters before, and every voter keeps what it has accepted (`Record`, on
  disk) and tells it when it is asked. The voters that are out are in every quorum of that
  configuration, else it would not be over; so one of them knows the change, and the same holds for
  the configuration that it tells, and so on to the last one.

A voter whose record is lost breaks that chain, see `joining`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from outlast.coordination.replicated.quorum import Voters


class Config(msgspec.Struct, frozen=True, array_like=True):
    """Voters, and the index of the log entry with which they came into force."""

    index: int
    voters: Voters


class Group(msgspec.Struct, frozen=True):
    """One group, as somebody knows it."""

    id: str  # the host that has founded it
    generation: int  # how many groups this run had before, as far as its founder knew
    committed: Config  # the last configuration that is known to be agreed on
    accepted: tuple[Config, ...] = ()  # later ones, which may be
    addresses: dict[str, tuple[str, int]] = {}  # of the voters, by id: address and port
    attempt: int = 0  # of its founder, to which a grant was given; 0 if it is known to be founded

    def merged(self, other: Group) -> Group:
        """Everything that either knows."""
        committed = max(self.committed, other.committed, key=lambda config: config.index)
        later = {c for c in (*self.accepted, *other.accepted) if c.index > committed.index}
        return Group(
            self.id,
            self.generation,
            committed,
            tuple(sorted(later, key=lambda config: config.index)),
            self.addresses | other.addresses,
            max(self.attempt, other.attempt) if self.attempt and other.attempt else 0,
        )

    @property
    def voters(self) -> frozenset[str]:
        """All that vote in a configuration that may be in force."""
        return frozenset().union(*(c.voters.all for c in (self.committed, *self.accepted)))

    def is_over(self, out: frozenset[str]) -> bool:
        """Whether it can never act again. Of a change that has begun, some voters may know only the
        old configuration, and some may already decide by the new one alone.
        """
        for config in (self.committed, *self.accepted):
            left = config.voters.all - out
            halves = (config.voters.new, config.voters.old)
            if any(half is not None and half.is_quorum(left) for half in halves):
                return False
        return True


class Past(msgspec.Struct, frozen=True):
    """What one agent knows; what two know can be merged."""

    groups: tuple[Group, ...] = ()  # those that may still act
    out: frozenset[str] = frozenset()  # ids of hosts that will never vote again
    generation: int = 0  # of the latest group
    withdrawn: dict[str, int] = {}  # the last attempt that a candidate has withdrawn, by its id
    # ids of groups that can never act again. This and what was withdrawn must be told like
    # everything else: others, which know less, would bring a group back that one forgets.
    over: frozenset[str] = frozenset()

    def merged(self, other: Past) -> Past:
        """Everything that either knows, without groups that are over or were never founded."""
        groups = {group.id: group for group in self.groups}
        for group in other.groups:
            known = groups.get(group.id)
            groups[group.id] = group if known is None else known.merged(group)
        out = self.out | other.out
        generations = (group.generation for group in groups.values())
        withdrawn = {
            host: max(self.withdrawn.get(host, 0), other.withdrawn.get(host, 0))
            for host in (self.withdrawn.keys() | other.withdrawn.keys()) - out
        }
        ended = {group.id for group in groups.values() if group.is_over(out)}
        over = self.over | other.over | ended
        return Past(
            tuple(
                group
                for group in groups.values()
                if group.id not in over and not 0 < group.attempt <= withdrawn.get(group.id, 0)
            ),
            out,
            max(self.generation, other.generation, *generations),
            withdrawn,
            over,
        )

    def with_out(self, hosts: Iterable[str]) -> Past:
        """The same, and these hosts are out."""
        return self.merged(Past(out=frozenset(hosts)))

    def with_group(self, group: Group) -> Past:
        return self.merged(Past(groups=(group,)))

    def without_group(self, group: str) -> Past:
        """The same without a group that was never founded."""
        groups = tuple(each for each in self.groups if each.id != group)
        return msgspec.structs.replace(self, groups=groups)

    def waits_for(self) -> dict[str, tuple[str, int]]:
        """The voters of which it must be known that they are out, with their addresses."""
        return {
            host: where
            for group in self.groups
            for host, where in group.addresses.items()
            if host in group.voters - self.out
        }
