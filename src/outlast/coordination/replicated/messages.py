"""The entries of the log, on which the voters agree, and what nodes send each other.

Messages may be lost, delayed, repeated and reordered. The transport says who sent a message. A time
in a message (`sent`) is by the clock of the host that reads it again: the answer returns it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.coordination.replicated.operations import Operation, Result, size_bytes
from outlast.coordination.replicated.quorum import Voters
from outlast.coordination.replicated.table import TableState


class Started(msgspec.Struct, frozen=True, tag_field="do"):
    """The first entry of a leader's term."""

    leader: str


class VotersChanged(msgspec.Struct, frozen=True, tag_field="do"):
    """In force as soon as it is in a voter's log, committed or not."""

    voters: Voters


class Written(msgspec.Struct, frozen=True, tag_field="do"):
    """Writes of several hosts: for each its floor (see `table.Session`) and numbered operations."""

    by_host: tuple[tuple[str, int, tuple[tuple[int, Operation], ...]], ...]

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes(op) for _, _, numbered in self.by_host for _, op in numbered)


Change: TypeAlias = Started | VotersChanged | Written | HostJoined | HostLost


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log, and the term of the leader that made it."""

    term: int
    change: Change


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class VoteRequest(_Message, frozen=True):
    """Asks for a vote in `term`; or, if `pre_vote`, whether there would be one.

    `handover`: the leader itself has asked for this election, and has stopped acting.
    """

    term: int
    last_index: int
    last_term: int
    pre_vote: bool
    handover: bool = False


class VoteAnswer(_Message, frozen=True):
    """`heard`: for how long the voter has not heard from any leader, nor voted, before."""

    term: int
    granted: bool
    pre_vote: bool
    heard: float = 0.0


class Append(_Message, frozen=True):
    """Entries of the leader's log after `prev_index`; without entries, a heartbeat to a voter."""

    term: int
    sent: float
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[LogEntry, ...] = ()


class Snapshot(_Message, frozen=True):
    """The leader's whole state after `index`, for a voter that needs entries that are gone: the
    table, and the voters and the author of the log as of that entry.
    """

    term: int
    sent: float
    index: int
    index_term: int
    table: TableState
    voters: Voters
    author: str | None


class AppendAnswer(_Message, frozen=True):
    """`match`: up to where the voter's log agrees; if not `accepted`, where the leader may try.
    `kept`: up to where the voter has all configurations of its log on disk.
    """

    term: int
    sent: float
    accepted: bool
    match: int
    kept: int


class Heartbeat(_Message, frozen=True):
    """Asks the leader for a lease that counts from `sent`, and confirms the number `covered`."""

    sent: float
    covered: int


class Grant(_Message, frozen=True):
    """Grants the lease that was asked for at `sent`; with `covered`, the read lease too."""

    term: int
    sent: float
    covered: int | None


class Recall(_Message, frozen=True):
    """There are `covered` covered keys now: the next heartbeat of the receiver confirms it."""

    covered: int


class Announce(_Message, frozen=True):
    """The sender leads: to a host that it does not hear."""

    term: int


class Requests(_Message, frozen=True):
    """Operations of a host, for the leader.

    Attributes:
        floor: all writes up to this number have been answered.
        operations: numbered; repeated until they are answered.
        waits: if given, the numbers of all waits that the host still has; others are over.
    """

    floor: int
    operations: tuple[tuple[int, Operation], ...] = ()
    waits: tuple[int, ...] | None = None


class Answers(_Message, frozen=True):
    """The results of operations of a host."""

    results: tuple[tuple[int, Result], ...]


class Refusal(_Message, frozen=True):
    """The receiver was declared lost, or has left: it must not act any more."""

    reason: str
    orderly: bool = False


class Leave(_Message, frozen=True):
    """The host leaves in order, and has stopped acting."""

    reason: str


class Handover(_Message, frozen=True):
    """The leader of `term` has stopped acting, and asks the receiver to take over."""

    term: int


_OfElections: TypeAlias = VoteRequest | VoteAnswer | Announce | Handover
_OfLogs: TypeAlias = Append | Snapshot | AppendAnswer
_OfHosts: TypeAlias = Heartbeat | Grant | Recall | Requests | Answers | Refusal | Leave
Message: TypeAlias = _OfElections | _OfLogs | _OfHosts

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """The message of some bytes, with values of the declared types; or a `ValueError`."""
    try:
        return _decoder.decode(data)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not a message of the replicated store: {e}: {data[:80]!r}") from e
