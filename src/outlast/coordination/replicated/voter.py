"""What a node keeps of the consensus in any role: its log, its term, its vote, its table."""

from __future__ import annotations

from typing import Any

from outlast.coordination.replicated import messages as msg
from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.coordination.replicated.quorum import NEVER, Configuration, Timing, Voters
from outlast.coordination.replicated.table import Table

KEPT = 100
"""Entries that are kept after they were performed, for voters that lag behind by less."""


class Log:
    """The entries in order, numbered from 1, without those up to `base`, which the table contains.

    Attributes:
        voters: the latest configuration in the log, committed or not: it is in force. `None` in the
            empty log of a new host.
        author: the leader of the term of the last entry.
    """

    def __init__(self, voters: Voters | None, kept: int) -> None:
        self._kept = kept
        self.reset(0, 0, voters, None)

    def reset(self, index: int, term: int, voters: Voters | None, author: str | None) -> None:
        """Starts anew after a snapshot that ends with the entry `index`."""
        self.base, self._base_term = index, term
        self._entries: list[msg.LogEntry] = []
        self._sizes: list[int] = []  # in bytes, about; asked for by each voter
        # The configurations and the authors, with the index from which on they count.
        self._voters: list[tuple[int, Voters | None]] = [(index, voters)]
        self._authors: list[tuple[int, str | None]] = [(index, author)]

    @property
    def last(self) -> int:
        return self.base + len(self._entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self._base_term

    @property
    def voters(self) -> Voters | None:
        return self._voters[-1][1]

    @property
    def voters_index(self) -> int:
        return self._voters[-1][0]

    @property
    def author(self) -> str | None:
        return self._authors[-1][1]

    def configurations(self, commit: int) -> tuple[tuple[int, Voters, bool], ...]:
        """The latest configuration up to `commit`, and all later ones; see `Node`."""
        found: list[tuple[int, Voters, bool]] = []
        for index, voters in reversed(self._voters):
            if voters is None:
                break
            found.append((index, voters, index <= commit))
            if index <= commit:
                break
        return tuple(reversed(found))

    def term(self, index: int) -> int | None:
        """The term of an entry; `None` if it is not there, or not any more."""
        if index == self.base:
            return self._base_term
        if self.base < index <= self.last:
            return self._entries[index - self.base - 1].term
        return None

    def change(self, index: int) -> msg.Change:
        return self._entries[index - self.base - 1].change

    def after(self, index: int, limit: int, limit_bytes: int) -> tuple[msg.LogEntry, ...]:
        """At most `limit` entries after `index`; no further one once they have `limit_bytes`."""
        taken, size = [], 0
        first = index - self.base
        for place in range(first, min(first + limit, len(self._entries))):
            taken.append(self._entries[place])
            size += self._sizes[place]
            if size >= limit_bytes:
                break
        return tuple(taken)

    def append(self, entry: msg.LogEntry) -> None:
        self._entries.append(entry)
        self._sizes.append(entry.change.size_bytes if isinstance(entry.change, msg.Written) else 0)
        if isinstance(entry.change, msg.VotersChanged):
            self._voters.append((self.last, entry.change.voters))
        elif isinstance(entry.change, msg.Started):
            self._authors.append((self.last, entry.change.leader))

    def cut(self, index: int) -> None:
        """Drops the entry at `index` and all later ones. None of them is committed."""
        del self._entries[index - self.base - 1 :]
        del self._sizes[index - self.base - 1 :]
        while self._voters[-1][0] >= index:
            self._voters.pop()
        while self._authors[-1][0] >= index:
            self._authors.pop()

    def compact(self, performed: int) -> None:
        if performed - self.base <= 2 * self._kept:
            return
        to = performed - self._kept
        term = self.term(to)
        assert term is not None
        self._base_term = term
        del self._entries[: to - self.base]
        del self._sizes[: to - self.base]
        self.base = to
        while len(self._voters) > 1 and self._voters[1][0] <= to:
            del self._voters[0]
        while len(self._authors) > 1 and self._authors[1][0] <= to:
            del self._authors[0]

    def at(self, index: int) -> tuple[Voters | None, str | None]:
        """The configuration and the author as of an entry that is not before `base`."""
        voters = next(v for i, v in reversed(self._voters) if i <= index)
        return voters, next(a for i, a in reversed(self._authors) if i <= index)


class Voter:
    """Follows leaders, and votes for candidates.

    Its memory is as good as a disk: the record of a vote, and the entries that it has accepted,
    live as long as its id. After a restart the process has a new id, which no configuration counts
    until a leader adds it; the old id never votes again.

    Attributes:
        leader: the leader of `term`, once it is known.
        heard: when a leader was last heard.
        voted_at: when it last voted for another.
        commit: up to here the log is agreed on; up to `applied` it is in the table.
        durable: the configurations that are on disk.
    """

    def __init__(self, me: str, timing: Timing, founding: Configuration | None, kept: int) -> None:
        self.me, self.timing = me, timing
        self.term = 0
        self.voted_for: str | None = None
        self.leader: str | None = None
        self.heard = NEVER
        self.voted_at = NEVER
        self.log = Log(None if founding is None else Voters(founding), kept)
        self.commit = 0
        self.applied = 0
        self.table = Table()
        self.durable: frozenset[tuple[int, Voters]] = frozenset()
        self._answered: tuple[str, int, int] | None = None  # the leader, the term, and `match`

    @property
    def others(self) -> list[str]:
        return [] if self.log.voters is None else sorted(self.log.voters.all - {self.me})

    # ------------------------------------------------------------------ the disk
    @property
    def kept(self) -> int:
        """Up to here this voter has all configurations of its log on disk, see `Leader`."""
        for index, voters, _ in self.log.configurations(self.commit):
            if (index, voters) not in self.durable:
                return index - 1
        return self.log.last

    def wrote(
        self, configurations: frozenset[tuple[int, Voters]]
    ) -> tuple[str, msg.Message] | None:
        """These are on disk; what the leader is to be told."""
        self.durable = configurations
        if self._answered is None or (self.leader, self.term) != self._answered[:2]:
            return None
        leader, term, match = self._answered
        return leader, msg.AppendAnswer(term, NEVER, True, match, self.kept)

    # ------------------------------------------------------------------ terms and votes
    def enter(self, term: int) -> None:
        self.term, self.voted_for, self.leader = term, None, None

    def hears_leader(self, now: float) -> bool:
        """Whether a leader was heard so recently that its quorum lease may still be valid.

        This is why two leaders never act at the same time. The lease of a leader counts from the
        moment that it sent what a quorum has answered. Each voter of this quorum got it later than
        that, and from then on votes for no other candidate for `sticky`, which is longer than the
        lease by the clock of any host. A later leader needs one of these voters.
        """
        return now < self.heard + self.timing.sticky

    def answer_vote(
        self, sender: str, asked: msg.VoteRequest, now: float, *, leads: bool
    ) -> msg.VoteAnswer | None:
        """The answer to a request for a vote, if any. `leads`: this leader has a valid lease."""
        if asked.term <= self.term and (asked.pre_vote or asked.term < self.term):
            return msg.VoteAnswer(self.term, False, asked.pre_vote)  # the candidate is behind
        # A leader that hands over has stopped acting before it asked for this election.
        if (leads or self.hears_leader(now)) and not asked.handover:
            return None
        current = (asked.last_term, asked.last_index) >= (self.log.last_term, self.log.last)
        # How long this voter has been out of reach of all leaders, its own vote included.
        silent = now - max(self.heard, self.voted_at)
        if asked.pre_vote:
            # Not while another may be winning: a second election would only unseat it.
            granted = current and now >= self.voted_at + self.timing.election_spread
            # A refusal carries this voter's own term. With the term that was asked for, a candidate
            # whose log lags would enter it, ask for the next one, and so make the leader, and each
            # candidate that could win, give up for a term in which nobody can.
            return msg.VoteAnswer(asked.term if granted else self.term, granted, True, silent)
        if asked.term > self.term:
            self.enter(asked.term)
        granted = current and self.leader is None and self.voted_for in (None, sender)
        if granted:
            self.voted_for, self.voted_at = sender, now
        return msg.VoteAnswer(self.term, granted, False, silent)

    # ------------------------------------------------------------------ the leader's messages
    def follow(
        self, sender: str, message: msg.Append | msg.Snapshot, now: float
    ) -> msg.AppendAnswer:
        if message.term < self.term:
            return msg.AppendAnswer(self.term, message.sent, False, self.commit, 0)
        if message.term > self.term:
            self.enter(message.term)
        self.leader, self.heard = sender, now
        if isinstance(message, msg.Snapshot):
            match: int | None = self._install(message)
        else:
            match = self._accept(message)
        if match is None:
            # The leader may try after the last entry that is surely equal. A new host needs all.
            last = -1 if self.log.voters is None else self.commit
            return msg.AppendAnswer(self.term, message.sent, False, last, 0)
        self._answered = sender, self.term, match
        return msg.AppendAnswer(self.term, message.sent, True, match, self.kept)

    def _accept(self, append: msg.Append) -> int | None:
        log, previous = self.log, append.prev_index
        if log.voters is None or previous > log.last:
            return None
        # What is before the base is committed, and therefore equal.
        if previous >= log.base and log.term(previous) != append.prev_term:
            return None
        for index, entry in enumerate(append.entries, previous + 1):
            if index <= log.base or log.term(index) == entry.term:
                continue
            if index <= log.last:
                log.cut(index)
            log.append(entry)
        match = previous + len(append.entries)
        self.commit = max(self.commit, min(append.commit, match))
        return match

    def _install(self, snapshot: msg.Snapshot) -> int:
        if snapshot.index <= self.commit:
            return self.commit
        if self.log.voters is not None and self.log.term(snapshot.index) == snapshot.index_term:
            # It may be a late copy: entries behind it were accepted, and must not be dropped.
            self.commit = snapshot.index
            return snapshot.index
        self.table = Table(snapshot.table)
        self.log.reset(snapshot.index, snapshot.index_term, snapshot.voters, snapshot.author)
        self.commit = self.applied = snapshot.index
        return snapshot.index

    # ------------------------------------------------------------------ the table
    def snapshot(self, sent: float) -> msg.Snapshot:
        voters, author = self.log.at(self.applied)
        term = self.log.term(self.applied)
        assert voters is not None
        assert term is not None
        return msg.Snapshot(self.term, sent, self.applied, term, self.table.state, voters, author)

    def apply(self) -> list[tuple[msg.Change, dict[str, dict[int, Any]]]]:
        """Performs the entries that are newly committed; returns each with its results by host."""
        self.log.compact(self.applied)
        performed = []
        while self.applied < self.commit:
            self.applied += 1
            change = self.log.change(self.applied)
            results: dict[str, dict[int, Any]] = {}
            if isinstance(change, msg.Written):
                for host, floor, numbered in change.by_host:
                    results.setdefault(host, {}).update(self.table.write(host, floor, numbered))
            elif isinstance(change, HostJoined):
                self.table.join(change)
            elif isinstance(change, HostLost):
                self.table.remove(change)
            performed.append((change, results))
        return performed
