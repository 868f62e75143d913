"""What replicas send each other, and its encoding: one line of JSON per message.

Messages may be lost, delayed, repeated and reordered. The transport says who sent a message. A time
in a message (`sent`) is by the clock of the host that reads it again: the answer returns it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from outlast.coordination.replicated.entries import Entry, pack_entry, unpack_entry
from outlast.coordination.replicated.operations import (
    Operation,
    Result,
    pack_operation,
    pack_result,
    unpack_operation,
    unpack_result,
)


@dataclass(frozen=True)
class VoteRequest:
    """Asks for a vote in `term`; or, if `trial`, whether there would be one.

    `handover`: the leader itself has asked for this election, and has stopped acting.
    """

    term: int
    last_index: int
    last_term: int
    trial: bool
    handover: bool = False


@dataclass(frozen=True)
class VoteAnswer:
    """`heard`: for how long the voter has not heard from any leader, nor voted, before."""

    term: int
    granted: bool
    trial: bool
    heard: float = 0.0


@dataclass(frozen=True)
class Append:
    """Entries of the leader's log after `prev_index`; without entries, a heartbeat to a voter."""

    term: int
    sent: float
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The leader's whole state after `index`, for a voter that needs entries that are gone."""

    term: int
    sent: float
    index: int
    index_term: int
    state: Any


@dataclass(frozen=True)
class AppendAnswer:
    """`match`: up to where the voter's log agrees; if not `accepted`, where the leader may try."""

    term: int
    sent: float
    accepted: bool
    match: int


@dataclass(frozen=True)
class Heartbeat:
    """A host asks the leader for a lease that counts from `sent`."""

    term: int
    sent: float


@dataclass(frozen=True)
class Grant:
    """The leader grants the lease that was asked for at `sent`."""

    term: int
    sent: float


@dataclass(frozen=True)
class Announce:
    """The sender leads: to a host that it does not hear."""

    term: int


@dataclass(frozen=True)
class Requests:
    """Operations of a host, for the leader.

    Attributes:
        floor: all writes up to this number have been answered.
        operations: numbered; repeated until they are answered.
        waits: if given, the numbers of all waits that the host still has; others are over.
    """

    floor: int
    operations: tuple[tuple[int, Operation], ...] = ()
    waits: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Answers:
    """The results of operations of a host."""

    results: tuple[tuple[int, Result], ...]


@dataclass(frozen=True)
class Refusal:
    """The receiver was declared lost, or has left: it must not act any more."""

    reason: str
    orderly: bool = False


@dataclass(frozen=True)
class Leave:
    """The host leaves in order, and has stopped acting."""

    reason: str


@dataclass(frozen=True)
class Handover:
    """The leader of `term` has stopped acting, and asks the receiver to take over."""

    term: int


Message: TypeAlias = (
    "VoteRequest | VoteAnswer | Append | Snapshot | AppendAnswer | Heartbeat | Grant | Announce"
    " | Requests | Answers | Refusal | Leave | Handover"
)

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        VoteRequest,
        VoteAnswer,
        Append,
        Snapshot,
        AppendAnswer,
        Heartbeat,
        Grant,
        Announce,
        Requests,
        Answers,
        Refusal,
        Leave,
        Handover,
    )
}


def encode(message: Message) -> bytes:
    """One line without a line break; `decode` reverses it."""
    said = [getattr(message, f.name) for f in fields(message)]
    if isinstance(message, Append):
        said[-1] = [pack_entry(entry) for entry in message.entries]
    elif isinstance(message, Requests):
        said[1] = [[number, pack_operation(op)] for number, op in message.operations]
    elif isinstance(message, Answers):
        said[0] = [[number, pack_result(result)] for number, result in message.results]
    text = json.dumps([type(message).__name__, *said], separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: if it is none.
    """
    try:
        name, *said = json.loads(line)
        kind = _KINDS[name]
        if kind is Append:
            said[-1] = tuple(unpack_entry(entry) for entry in said[-1])
        elif kind is Requests:
            said[1] = tuple((number, unpack_operation(op)) for number, op in said[1])
            said[2] = None if said[2] is None else tuple(said[2])
        elif kind is Answers:
            said[0] = tuple((number, unpack_result(result)) for number, result in said[0])
        message: Message = kind(*said)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"not a message of a replica: {line[:80]!r}") from e
    return message
