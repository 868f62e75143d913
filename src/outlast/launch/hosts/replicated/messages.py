"""What agents send each other, and its encoding. Nothing here is pickled.

The first message of each side is `Hello`; the listener may answer `Refused` instead. A finder sends
`Find` to the endpoints, and learns that an agent is as fresh as itself (`Fresh`) or is in a group
(`Member`). `AskGrant` and `Grant` decide who founds the group; `Join` is answered with
`Admitted`, `NotYet` or `Refused`. `Replicated` carries a message of the consensus. `Drain` comes
from the command `outlast drain`, which is no host of the group, and is answered with `Drained`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.hosts.replicated.past import Group, Past

PROTOCOL = 7
"""Grows with every change of these messages or of those of the consensus."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Hello(_Message, frozen=True):
    """Who speaks."""

    protocol: int
    run_id: str
    host: HostInfo


class Refused(_Message, frozen=True):
    """The receiver must not take part."""

    reason: str


class Find(_Message, frozen=True):
    """Asks whether the receiver is in a group; `past`: what the sender knows of earlier ones."""

    past: Past


class Fresh(_Message, frozen=True):
    """The sender is in no group. `endpoint` is its index among the endpoints, -1 for none."""

    endpoint: int
    past: Past


class Member(_Message, frozen=True):
    """The sender is in the group `group` of `hosts` hosts, led by `leader` as far as it knows.
    `known`: its voters, unless the sender never was one.
    """

    group: str
    generation: int
    leader: HostInfo | None
    hosts: int
    known: Group | None = None


class AskGrant(_Message, frozen=True):
    """Endpoint `endpoint` wants to found the group; `attempt` counts its attempts. Unless `sure`,
    it only asks whether the receiver would grant.
    """

    endpoint: int
    attempt: int
    past: Past
    sure: bool


class Grant(_Message, frozen=True):
    """The sender, an endpoint, lets the receiver found the group; or it would, unless `sure`."""

    endpoint: int
    attempt: int
    sure: bool


class Join(_Message, frozen=True):
    """Asks the leader to admit the sender."""


class Admitted(_Message, frozen=True):
    """The receiver is a host of the group from now on. `hosts` are the voters and the leader."""

    group: str
    generation: int
    leader: str
    hosts: tuple[HostInfo, ...]


class NotYet(_Message, frozen=True):
    """The receiver cannot be admitted now, and should ask again; for `limit_s` seconds, unless that
    is 0.
    """

    reason: str
    limit_s: float = 0.0


class Replicated(_Message, frozen=True):
    """A message of the consensus of `group`, encoded, to the host `receiver`. Another host ignores
    it: a restarted agent has the address of the one before, but is another host.
    """

    group: str
    receiver: str
    data: bytes


class Drain(_Message, frozen=True):
    """Hosts are to leave, by the names that the user has given; or a rank is to move, if not -1."""

    hosts: tuple[str, ...]
    rank: int
    reason: str


class Drained(_Message, frozen=True):
    """What the sender has made of a `Drain`: a line for each; or why nothing, by `problem`."""

    lines: tuple[str, ...]
    problem: str = ""


_OfFinders: TypeAlias = Find | Fresh | Member | AskGrant | Grant
_OfJoiners: TypeAlias = Join | Admitted | NotYet
Message: TypeAlias = Hello | Refused | _OfFinders | _OfJoiners | Replicated | Drain | Drained

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """The reverse of `encode`. All values have the declared types, whoever has sent them."""
    try:
        return _decoder.decode(payload)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not a message of an agent: {e}") from e
