"""The entries of the log: what the voters agree on."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import Operation, size_bytes
from outlast.coordination.replicated.quorum import Voters


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first entry of a leader's term."""

    leader: str


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The voters change. In force as soon as it is in a voter's log, committed or not."""

    voters: Voters


class Written(msgspec.Struct, frozen=True, tag=True):
    """Writes of several hosts: for each its floor (see `table.Session`) and numbered operations."""

    by_host: tuple[tuple[str, int, tuple[tuple[int, Operation], ...]], ...]

    @property
    def size_bytes(self) -> int:
        """About how long it is in a message."""
        return sum(size_bytes(op) for _, _, numbered in self.by_host for _, op in numbered)


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A host is admitted."""

    info: HostInfo


class Removed(msgspec.Struct, frozen=True, tag=True):
    """A host was declared lost, or has left."""

    host: str
    reason: str
    orderly: bool = False


Change: TypeAlias = Started | Changed | Written | Joined | Removed


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log, and the term of the leader that made it."""

    term: int
    change: Change
