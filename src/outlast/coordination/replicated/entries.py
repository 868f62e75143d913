"""The entries of the log: what the voters agree on, and its encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Operation, pack_operation, unpack_operation
from outlast.coordination.replicated.quorum import Voters


@dataclass(frozen=True)
class Started:
    """The first entry of a leader's term."""

    leader: str


@dataclass(frozen=True)
class Changed:
    """The voters change. In force as soon as it is in a voter's log, committed or not."""

    voters: Voters


@dataclass(frozen=True)
class Written:
    """Writes of several hosts: for each its floor (see `table.Session`) and numbered operations."""

    by_host: tuple[tuple[str, int, tuple[tuple[int, Operation], ...]], ...]


@dataclass(frozen=True)
class Joined:
    """A host is admitted."""

    info: HostInfo


@dataclass(frozen=True)
class Removed:
    """A host was declared lost, or has left."""

    host: str
    reason: str
    orderly: bool = False


Change: TypeAlias = "Started | Changed | Written | Joined | Removed"


@dataclass(frozen=True)
class Entry:
    """One entry of the log, and the term of the leader that made it."""

    term: int
    change: Change


def pack_entry(entry: Entry) -> list[Any]:
    """As a JSON value."""
    change = entry.change
    if isinstance(change, Started):
        return [entry.term, "s", change.leader]
    if isinstance(change, Changed):
        return [entry.term, "c", change.voters.pack()]
    if isinstance(change, Joined):
        return [entry.term, "j", change.info.encode()]
    if isinstance(change, Removed):
        return [entry.term, "r", [change.host, change.reason, change.orderly]]
    writes = [
        [host, floor, [[n, pack_operation(op)] for n, op in numbered]]
        for host, floor, numbered in change.by_host
    ]
    return [entry.term, "w", writes]


def unpack_entry(packed: list[Any]) -> Entry:
    """The reverse of `pack_entry`."""
    term, kind, said = packed
    change: Change
    if kind == "s":
        change = Started(said)
    elif kind == "c":
        change = Changed(Voters.unpack(said))
    elif kind == "j":
        change = Joined(HostInfo.decode(said))
    elif kind == "r":
        change = Removed(*said)
    else:
        change = Written(
            tuple(
                (host, floor, tuple((n, unpack_operation(op)) for n, op in numbered))
                for host, floor, numbered in said
            )
        )
    return Entry(term, change)
