"""When a voter becomes a candidate, and the votes that it gets."""

from __future__ import annotations

import random

from outlast.coordination.replicated.messages import VoteAnswer, VoteRequest
from outlast.coordination.replicated.quorum import NEVER
from outlast.coordination.replicated.voter import Voter


class Election:
    """The votes for one candidate in one term.

    First a pre-vote: only if a quorum would vote for it, a candidate enters a new term. So a host
    that was cut off or stopped does not disturb the others when it returns, with a grown term.
    """

    def __init__(self, voter: Voter, now: float, *, pre_vote: bool, handover: bool = False) -> None:
        self._voter = voter
        silent = now - max(voter.heard, voter.voted_at)
        if not pre_vote:
            voter.enter(voter.term + 1)
            voter.voted_for, voter.voted_at = voter.me, now
        self.pre_vote = pre_vote
        self._began = now
        self.term = voter.term + 1 if pre_vote else voter.term
        self._votes: dict[str, float] = {}
        self._vote(voter.me, silent, now)
        log = voter.log
        self.request = VoteRequest(self.term, log.last, log.last_term, pre_vote, handover)

    def _vote(self, voter: str, silent: float, now: float) -> None:
        # One second of that voter's clock may be less of ours.
        self._votes[voter] = now - silent / (1 + self._voter.timing.margin)

    def take(self, sender: str, answer: VoteAnswer, now: float) -> None:
        if answer.granted and answer.term == self.term and answer.pre_vote == self.pre_vote:
            self._vote(sender, answer.heard, now)

    def is_over(self, now: float) -> bool:
        """Whether this election was overtaken: by another term, or by a leader."""
        if self.pre_vote:
            return self.term != self._voter.term + 1 or self._voter.hears_leader(now)
        return self.term != self._voter.term or self._voter.leader is not None

    def precedes(self, other: str, asked: VoteRequest, now: float) -> bool:
        """Whether this candidate goes before `other`, which asks at the same time. Only while this
        election is young: one that gets no answers must not hold up another for good.
        """
        log = self._voter.log
        mine = (log.last_term, log.last, self._voter.me)
        young = now < self._began + self._voter.timing.election_spread / 2
        return young and mine > (asked.last_term, asked.last_index, other)

    @property
    def won(self) -> bool:
        voters = self._voter.log.voters
        return voters is not None and voters.is_quorum(self._votes)

    def predecessor_heard(self) -> float:
        """From when the lease of the former leader's host counts, by this host's clock, or a later
        time.

        That lease counts from what its leader sent to a quorum, or from a heartbeat that it sent
        before its own election. A voter of that quorum, or of that election, is in this quorum too:
        it was in reach of a leader, or voted, at that moment or later.
        """
        return max(self._votes.values())


class Campaigns:
    """Decides when a voter that hears no leader becomes a candidate."""

    def __init__(self, voter: Voter, rng: random.Random) -> None:
        self._voter, self._rng = voter, rng
        self._patience = self._draw()
        self._next = NEVER

    def _draw(self) -> float:
        return self._voter.timing.election_spread * self._rng.random()

    @property
    def possible(self) -> bool:
        """Whether this voter may lead: it is in the configuration, and was not removed."""
        voter = self._voter
        voters = voter.log.voters
        return voters is not None and voter.me in voters.all and voter.me not in voter.table.gone

    def due(self) -> float:
        """When to become a candidate: not while a leader may act, nor while another, for whom this
        voter has voted, may be winning. A founder waits for nothing.
        """
        voter, timing = self._voter, self._voter.timing
        quiet = max(voter.heard + timing.sticky, voter.voted_at + timing.election_spread)
        return max(quiet + self._patience, self._next)

    def begin(self, now: float, *, pre_vote: bool, handover: bool) -> Election:
        """Begins an election; the next is due after a random time."""
        self._patience = self._draw()
        self._next = now + self._voter.timing.election_spread / 2 + self._patience
        return Election(self._voter, now, pre_vote=pre_vote, handover=handover)
