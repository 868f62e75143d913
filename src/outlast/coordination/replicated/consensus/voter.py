"""What a replica keeps of the consensus in any role: its term, its vote, its log, its table."""

from __future__ import annotations

from typing import Any

from outlast.coordination.replicated.consensus.log import Log
from outlast.coordination.replicated.entries import Change, Joined, Removed, Written
from outlast.coordination.replicated.messages import (
    Append,
    AppendAnswer,
    Message,
    Snapshot,
    VoteAnswer,
    VoteRequest,
)
from outlast.coordination.replicated.quorum import Configuration, Voters
from outlast.coordination.replicated.table import Table
from outlast.coordination.replicated.timing import Timing

NEVER = float("-inf")


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
        durable: the configurations that are on disk; `None` if none has to be.
    """

    def __init__(self, me: str, timing: Timing, founding: Configuration | None, kept: int) -> None:
        self.me = me
        self.timing = timing
        self.term = 0
        self.voted_for: str | None = None
        self.leader: str | None = None
        self.heard = NEVER
        self.voted_at = NEVER
        self.log = Log(None if founding is None else Voters(founding), kept)
        self.commit = 0
        self.applied = 0
        self.table = Table()
        self.durable: frozenset[tuple[int, Voters]] | None = None
        self._answered: tuple[str, int, int] | None = None  # the leader, the term, and `match`

    @property
    def others(self) -> list[str]:
        """The other voters, as far as this host knows."""
        return [] if self.log.voters is None else sorted(self.log.voters.all - {self.me})

    # ------------------------------------------------------------------ the disk
    @property
    def kept(self) -> int:
        """Up to here this voter has all configurations of its log on disk, see `Leader`."""
        if self.durable is not None:
            for index, voters, _ in self.log.configurations(self.commit):
                if (index, voters) not in self.durable:
                    return index - 1
        return self.log.last

    def wrote(self, configurations: frozenset[tuple[int, Voters]]) -> tuple[str, Message] | None:
        """These are on disk; what the leader is to be told."""
        self.durable = configurations
        if self._answered is None or (self.leader, self.term) != self._answered[:2]:
            return None
        leader, term, match = self._answered
        return leader, AppendAnswer(term, NEVER, True, match, self.kept)

    # ------------------------------------------------------------------ terms and votes
    def enter(self, term: int) -> None:
        """Enters a later term, in which it has not voted."""
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
        self, sender: str, asked: VoteRequest, now: float, *, leads: bool
    ) -> Message | None:
        """The answer to a request for a vote, if any. `leads`: this replica is a leader whose lease
        is valid.
        """
        if asked.term <= self.term and (asked.trial or asked.term < self.term):
            return VoteAnswer(self.term, False, asked.trial)  # the candidate is behind
        # A leader that hands over has stopped acting before it asked for this election.
        if (leads or self.hears_leader(now)) and not asked.handover:
            return None
        current = (asked.last_term, asked.last_index) >= (self.log.last_term, self.log.last)
        # How long this voter has been out of reach of all leaders, its own vote included.
        silent = now - max(self.heard, self.voted_at)
        if asked.trial:
            # Not while another may be winning: a second election would only unseat it.
            granted = current and now >= self.voted_at + self.timing.election_spread
            # A refusal carries this voter's own term. With the term that was asked for, a candidate
            # whose log lags would enter it, ask for the next one, and so make the leader, and each
            # candidate that could win, give up for a term in which nobody can.
            return VoteAnswer(asked.term if granted else self.term, granted, True, silent)
        if asked.term > self.term:
            self.enter(asked.term)
        granted = current and self.leader is None and self.voted_for in (None, sender)
        if granted:
            self.voted_for, self.voted_at = sender, now
        return VoteAnswer(self.term, granted, False, silent)

    # ------------------------------------------------------------------ the leader's messages
    def follow(self, sender: str, said: Append | Snapshot, now: float) -> AppendAnswer:
        """Takes a message of a leader; the answer."""
        if said.term < self.term:
            return AppendAnswer(self.term, said.sent, False, self.commit, 0)
        if said.term > self.term:
            self.enter(said.term)
        self.leader, self.heard = sender, now
        match = self._install(said) if isinstance(said, Snapshot) else self._accept(said)
        if match is None:
            # The leader may try after the last entry that is surely equal. A new host needs all.
            last = -1 if self.log.voters is None else self.commit
            return AppendAnswer(self.term, said.sent, False, last, 0)
        self._answered = sender, self.term, match
        return AppendAnswer(self.term, said.sent, True, match, self.kept)

    def _accept(self, said: Append) -> int | None:
        log, previous = self.log, said.prev_index
        if log.voters is None or previous > log.last:
            return None
        # What is before the base is committed, and therefore equal.
        if previous >= log.base and log.term(previous) != said.prev_term:
            return None
        for index, entry in enumerate(said.entries, previous + 1):
            if index <= log.base or log.term(index) == entry.term:
                continue
            if index <= log.last:
                log.cut(index)
            log.append(entry)
        match = previous + len(said.entries)
        self.commit = max(self.commit, min(said.commit, match))
        return match

    def _install(self, said: Snapshot) -> int:
        if said.index <= self.commit:
            return self.commit
        if self.log.voters is not None and self.log.term(said.index) == said.index_term:
            # A late copy, perhaps: entries behind it were accepted, and must not be dropped.
            self.commit = said.index
            return said.index
        self.table = Table(said.table)
        self.log.reset(said.index, said.index_term, said.voters, said.author)
        self.commit = self.applied = said.index
        return said.index

    # ------------------------------------------------------------------ the table
    def snapshot(self, sent: float) -> Snapshot:
        """The state up to `applied`."""
        voters, author = self.log.at(self.applied)
        term = self.log.term(self.applied)
        assert voters is not None
        assert term is not None
        return Snapshot(self.term, sent, self.applied, term, self.table.state, voters, author)

    def apply(self) -> list[tuple[Change, dict[str, dict[int, Any]]]]:
        """Performs the entries that are newly committed; returns each with its results by host."""
        self.log.compact(self.applied)
        performed = []
        while self.applied < self.commit:
            self.applied += 1
            change = self.log.change(self.applied)
            results: dict[str, dict[int, Any]] = {}
            if isinstance(change, Written):
                for host, floor, numbered in change.by_host:
                    results.setdefault(host, {}).update(self.table.write(host, floor, numbered))
            elif isinstance(change, Joined):
                self.table.join(change.info)
            elif isinstance(change, Removed):
                self.table.remove(change.host, change.reason, orderly=change.orderly)
            performed.append((change, results))
        return performed
