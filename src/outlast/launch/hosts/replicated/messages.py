"""What agents send each other, and its encoding. Nothing here is pickled.

The first message of each side is `Hello`; the listener may answer `Refused` instead. A finder sends
`Find` to the endpoints, and learns that an agent is as fresh as itself (`Fresh`) or is in a group
(`Member`). `AskGrant`, `Grant`, `Withdraw` decide who founds the group; `Join` is answered with
`Admitted`, `NotYet` or `Refused`. `Replicated` carries a message of the consensus.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, get_args

from outlast.coordination.replicated.hosts import HostInfo

PROTOCOL = 1
"""Grows with every change of these messages or of those of the consensus."""


@dataclass(frozen=True)
class Hello:
    """Who speaks."""

    protocol: int
    run_id: str
    host: HostInfo


@dataclass(frozen=True)
class Refused:
    """The receiver must not take part: `setting` is the option or property that is wrong."""

    setting: str
    reason: str


@dataclass(frozen=True)
class Find:
    """Asks whether the receiver is in a group."""


@dataclass(frozen=True)
class Fresh:
    """The sender is in no group yet. `endpoint` is its index among the endpoints, -1 for none."""

    endpoint: int


@dataclass(frozen=True)
class Member:
    """The sender is in the group `group` of `hosts` hosts, led by `leader` as far as it knows."""

    group: str
    leader: HostInfo | None
    hosts: int


@dataclass(frozen=True)
class AskGrant:
    """Endpoint `endpoint` wants to found the group; `attempt` counts its attempts."""

    endpoint: int
    attempt: int


@dataclass(frozen=True)
class Grant:
    """The sender, an endpoint, lets the receiver found the group."""

    endpoint: int
    attempt: int


@dataclass(frozen=True)
class Withdraw:
    """Endpoint `endpoint` will not use grants of this attempt, or earlier ones, any more."""

    endpoint: int
    attempt: int


@dataclass(frozen=True)
class Join:
    """Asks the leader to admit the sender."""


@dataclass(frozen=True)
class Admitted:
    """The receiver is a host of the group from now on. `hosts` are the voters and the leader."""

    group: str
    leader: str
    hosts: tuple[HostInfo, ...]


@dataclass(frozen=True)
class NotYet:
    """The receiver cannot be admitted now, and should ask again; for `limit_s` seconds, unless that
    is 0.
    """

    reason: str
    limit_s: float = 0.0


@dataclass(frozen=True)
class Replicated:
    """A message of the consensus of `group`, encoded, to the host `receiver`. Another host ignores
    it: a restarted agent has the address of the one before, but is another host.
    """

    group: str
    receiver: str
    data: bytes


Message: TypeAlias = (
    Hello
    | Refused
    | Find
    | Fresh
    | Member
    | AskGrant
    | Grant
    | Withdraw
    | Join
    | Admitted
    | NotYet
    | Replicated
)

_JSON, _REPLICATED = b"J", b"R"
_KINDS = {kind.__name__: kind for kind in get_args(Message) if kind is not Replicated}


def encode(message: Message) -> bytes:
    """The payload of a frame."""
    if isinstance(message, Replicated):
        head = f"{message.group}\n{message.receiver}\n".encode()
        return _REPLICATED + head + message.data
    said = [type(message).__name__, asdict(message)]
    return _JSON + json.dumps(said, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """The reverse of `encode`.

    Raises:
        ValueError: for anything that `encode` does not produce.
    """
    try:
        if payload[:1] == _REPLICATED:
            group, receiver, data = payload[1:].split(b"\n", 2)
            return Replicated(group.decode(), receiver.decode(), data)
        if payload[:1] != _JSON:
            raise ValueError("unknown kind of message")
        name, said = json.loads(payload[1:])
        return _made(_KINDS[name], said)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"not a message of an agent: {e}") from e


def _made(kind: Any, said: dict[str, Any]) -> Message:
    if kind is Hello:
        said["host"] = _host(said["host"])
    elif kind is Member and said["leader"] is not None:
        said["leader"] = _host(said["leader"])
    elif kind is Admitted:
        said["hosts"] = tuple(_host(each) for each in said["hosts"])
    message: Message = kind(**said)
    _check(message)
    return message


def _host(said: dict[str, Any]) -> HostInfo:
    host = HostInfo(**said)
    _check(host)
    if not all(isinstance(text, str) for pair in host.settings.items() for text in pair):
        raise ValueError("settings must be text")
    if host.address:
        ipaddress.ip_address(host.address.partition("%")[0])
    if not 0 <= host.port < 1 << 16:
        raise ValueError(f"no port: {host.port}")
    return host


def _check(made: Any) -> None:
    """A stranger must not get a value of another type into this process."""
    for field in fields(made):
        wanted = {"str": str, "int": int, "float": float}.get(str(field.type))
        if wanted is not None and type(getattr(made, field.name)) is not wanted:
            raise ValueError(f"{field.name} must be of type {field.type}")
