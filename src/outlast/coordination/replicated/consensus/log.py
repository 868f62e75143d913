"""The log of a voter: the entries in order, without the oldest, which the table contains."""

from __future__ import annotations

import itertools

from outlast.coordination.replicated.entries import Change, Changed, Entry, Started, Written
from outlast.coordination.replicated.quorum import Voters

KEPT = 100
"""Entries that are kept after they were performed, for voters that lag behind by less."""


class Log:
    """Entries are numbered from 1. `base` is the last one that was dropped.

    Attributes:
        voters: the latest configuration in the log, committed or not: it is in force. `None` in the
            empty log of a new host.
        author: the leader of the term of the last entry.
    """

    def __init__(self, voters: Voters | None, kept: int) -> None:
        self._kept = kept
        self.base = 0
        self._base_term = 0
        self._entries: list[Entry] = []
        # The configurations and the authors, with the index from which on they count.
        self._voters: list[tuple[int, Voters | None]] = [(0, voters)]
        self._authors: list[tuple[int, str | None]] = [(0, None)]

    @property
    def last(self) -> int:
        """The index of the last entry."""
        return self.base + len(self._entries)

    @property
    def last_term(self) -> int:
        """The term of the last entry."""
        return self._entries[-1].term if self._entries else self._base_term

    @property
    def voters(self) -> Voters | None:
        return self._voters[-1][1]

    @property
    def voters_index(self) -> int:
        """The entry that brought the present configuration."""
        return self._voters[-1][0]

    def configurations(self, commit: int) -> tuple[tuple[int, Voters, bool], ...]:
        """The latest configuration up to `commit`, and all later ones; see `Replica`."""
        found: list[tuple[int, Voters, bool]] = []
        for index, voters in reversed(self._voters):
            if voters is None:
                break
            found.append((index, voters, index <= commit))
            if index <= commit:
                break
        return tuple(reversed(found))

    @property
    def author(self) -> str | None:
        return self._authors[-1][1]

    def term(self, index: int) -> int | None:
        """The term of an entry; `None` if it is not there, or not any more."""
        if index == self.base:
            return self._base_term
        if self.base < index <= self.last:
            return self._entries[index - self.base - 1].term
        return None

    def change(self, index: int) -> Change:
        """What an entry says."""
        return self._entries[index - self.base - 1].change

    def after(self, index: int, most: int, most_bytes: int) -> tuple[Entry, ...]:
        """The entries after `index`: `most` of them at the most, and no further one once they have
        `most_bytes`.
        """
        taken, size = [], 0
        for entry in itertools.islice(self._entries, index - self.base, index - self.base + most):
            taken.append(entry)
            size += entry.change.size_bytes if isinstance(entry.change, Written) else 0
            if size >= most_bytes:
                break
        return tuple(taken)

    def append(self, entry: Entry) -> None:
        """Adds an entry at the end."""
        self._entries.append(entry)
        if isinstance(entry.change, Changed):
            self._voters.append((self.last, entry.change.voters))
        elif isinstance(entry.change, Started):
            self._authors.append((self.last, entry.change.leader))

    def cut(self, index: int) -> None:
        """Drops the entry at `index` and all later ones. None of them is committed."""
        del self._entries[index - self.base - 1 :]
        while self._voters[-1][0] >= index:
            self._voters.pop()
        while self._authors[-1][0] >= index:
            self._authors.pop()

    def compact(self, performed: int) -> None:
        """Drops old entries, all of which have been performed."""
        if performed - self.base <= 2 * self._kept:
            return
        to = performed - self._kept
        term = self.term(to)
        assert term is not None
        self._base_term = term
        del self._entries[: to - self.base]
        self.base = to
        while len(self._voters) > 1 and self._voters[1][0] <= to:
            del self._voters[0]
        while len(self._authors) > 1 and self._authors[1][0] <= to:
            del self._authors[0]

    def at(self, index: int) -> tuple[Voters | None, str | None]:
        """The configuration and the author as of an entry that is not before `base`."""
        voters = next(v for i, v in reversed(self._voters) if i <= index)
        return voters, next(a for i, a in reversed(self._authors) if i <= index)

    def reset(self, index: int, term: int, voters: Voters, author: str | None) -> None:
        """Starts anew after a snapshot that ends with the entry `index`."""
        self.base, self._base_term = index, term
        self._entries = []
        self._voters = [(index, voters)]
        self._authors = [(index, author)]
