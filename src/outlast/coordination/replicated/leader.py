"""A leader's part in the consensus: it copies its log to the voters, and changes who they are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from outlast.coordination.replicated import messages as msg
from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.coordination.replicated.operations import MESSAGE_BYTES
from outlast.coordination.replicated.quorum import NEVER, Configuration, Voters
from outlast.coordination.replicated.read_leases import ReadLeases
from outlast.coordination.replicated.serving import HostLeases, Serving
from outlast.coordination.replicated.voter import Voter

MAX_VOTERS = 7
MAX_ENTRIES = 64


@dataclass
class Progress:
    """What the leader knows of another voter, or of a host that is to become one.

    Attributes:
        match: up to here its log is equal.
        kept: up to here it has the configurations of that on disk.
        next: the next entry to send.
        acked: when the last message was sent that it has answered, by the leader's clock.
        busy: until when entries are on their way; others gather meanwhile.
    """

    next: int
    match: int = 0
    kept: int = 0
    acked: float = NEVER
    busy: float = NEVER
    due: float = NEVER
    snapshot_due: float | None = None


class Leader:
    """Exists from the election until another term begins or the quorum is lost."""

    def __init__(self, voter: Voter, now: float, predecessor: tuple[str, float] | None) -> None:
        self._voter = voter
        self._timing = voter.timing
        self.term = voter.term
        self.elected = now
        self.leases = HostLeases(voter.timing, now, predecessor)
        self.read_leases = ReadLeases(voter.me, voter.timing)
        self.serving = Serving(voter, self.read_leases)
        self._peers: dict[str, Progress] = {}
        self._changes: list[msg.Change] = []
        self._joining: set[str] = set()
        self._lease: tuple[Voters | None, float] = None, NEVER
        self._append(msg.Started(voter.me))
        self._first = voter.log.last
        voter.leader = voter.me

    # ------------------------------------------------------------------ what holds
    @property
    def voters(self) -> Voters:
        voters = self._voter.log.voters
        assert voters is not None
        return voters

    @property
    def ready(self) -> bool:
        """Whether the first entry of this term is in the table, and with it everything that earlier
        leaders have agreed on. Before, a leader answers nothing and grants no lease.
        """
        return self._voter.applied >= self._first

    def quorum_heard(self, now: float) -> float:
        """The latest moment such that a quorum has answered what was sent since."""

        def answered(voter: str) -> float:
            if voter == self._voter.me:
                return now
            return self._peers[voter].acked if voter in self._peers else NEVER

        return self.voters.reached_by_quorum(answered)

    def lease_valid(self, now: float) -> bool:
        """Whether it may answer reads and grant leases. Asked for each message, so it remembers
        until when the answer is yes: while the voters are the same, what a quorum has answered
        never moves back, as a voter is forgotten only after a change of the voters.
        """
        voters, until = self._lease
        if voters is not self.voters or now >= until:
            self._lease = self.voters, self.quorum_heard(now) + self._timing.quorum_lease
        return now < self._lease[1]

    def has_quorum(self, now: float) -> bool:
        """Whether it may go on: it has a quorum, or has not had the time to hear one."""
        return now < max(self.quorum_heard(now), self.elected) + self._timing.quorum_lease

    # ------------------------------------------------------------------ hosts
    def propose(self, change: HostJoined | HostLost) -> None:
        """Admits or removes a host, once."""
        table = self._voter.table
        if isinstance(change, HostJoined):
            host = change.info.id
            if host in self._joining or host in table.sessions or host in table.gone:
                return
            self._joining.add(host)
        elif change.host in self.leases.losing or change.host not in table.sessions:
            return
        else:
            self.leases.losing.add(change.host)
        self._changes.append(change)

    def end_leases(self, now: float) -> None:
        if self.ready and self.lease_valid(now):
            for host, silent in self.leases.expired(now):
                self.propose(HostLost(host, f"no heartbeat for {silent:.1f} s"))

    # ------------------------------------------------------------------ the log
    def _append(self, change: msg.Change) -> None:
        self._voter.log.append(msg.LogEntry(self.term, change))

    def round(self, now: float) -> list[tuple[str, msg.Message]]:
        """Ends a round of inputs: makes one entry of all gathered writes (or a few, if they are
        long), and returns what is to be sent to the voters.
        """
        self._change_voters(now)
        while (written := self.serving.gathered()) is not None:
            self._append(written)
        for change in self._changes:
            self._append(change)
        self._changes.clear()
        self._advance()
        messages = ((name, self._message(peer, now)) for name, peer in self._peers.items())
        return [(name, message) for name, message in messages if message is not None]

    def _message(self, peer: Progress, now: float) -> msg.Message | None:
        log = self._voter.log
        if peer.snapshot_due is not None and now >= peer.snapshot_due:
            peer.snapshot_due = now + self._timing.lease / 2  # it may be large: no haste
            return self._voter.snapshot(now)
        has_more = peer.snapshot_due is None and peer.next <= log.last and now >= peer.busy
        if now < peer.due and not has_more:
            return None
        peer.due = now + self._timing.append_interval
        if has_more:
            peer.busy = now + self._timing.retry
        previous = peer.next - 1
        previous_term = log.term(previous)
        if previous_term is None:  # only a heartbeat, until it has the snapshot
            previous, previous_term = log.base, log.term(log.base) or 0
        entries = log.after(previous, MAX_ENTRIES, MESSAGE_BYTES) if has_more else ()
        commit = self._voter.commit
        return msg.Append(self.term, now, previous, previous_term, commit, entries)

    def answered(self, sender: str, answer: msg.AppendAnswer) -> None:
        peer = self._peers.get(sender)
        if peer is None:
            return
        peer.acked = max(peer.acked, answer.sent)
        if answer.match >= peer.match:
            peer.busy = NEVER
        if answer.accepted:
            peer.match = max(peer.match, answer.match)
            peer.kept = max(peer.kept, min(answer.kept, answer.match))
            peer.next = peer.match + 1
            peer.snapshot_due = None if peer.next > self._voter.log.base else peer.snapshot_due
        else:
            peer.next = max(peer.match, answer.match) + 1
        if answer.match < 0 or peer.next <= self._voter.log.base:
            peer.snapshot_due = NEVER if peer.snapshot_due is None else peer.snapshot_due

    def _advance(self) -> None:
        """Commits what a quorum has.

        Only an entry of this term: an entry of an earlier term that a quorum has may still be
        replaced, by a leader whose log ends with a later term and that this quorum would elect. All
        that is before an entry of this term is committed with it.
        """

        def has(voter: str) -> float:
            if voter == self._voter.me:
                return self._voter.log.last
            return self._peers[voter].match if voter in self._peers else 0

        index = int(self.voters.reached_by_quorum(has))
        if index > self._voter.commit and self._voter.log.term(index) == self.term:
            self._voter.commit = index

    # ------------------------------------------------------------------ the voters
    def _change_voters(self, now: float) -> None:
        """Takes the next step towards the configuration that is wanted; one change at a time."""
        voter, voters = self._voter, self.voters
        learners = self._learners(now) if self.ready else []
        keep = voters.all.union(learners) - {voter.me}
        for name in [name for name in self._peers if name not in keep]:
            del self._peers[name]
        for name in sorted(keep.difference(self._peers)):
            self._peers[name] = Progress(voter.log.last + 1)
        if not self.ready or voter.log.voters_index > voter.commit:
            return
        if voters.old is not None:
            if voters.reached_by_quorum(self._kept) >= voter.log.voters_index:
                self._append(msg.VotersChanged(Voters(voters.new)))
            return
        caught_up = [name for name in learners if self._peers[name].match >= voter.commit]
        present = [name for name in sorted(voters.new.voters) if name not in voter.table.gone]
        wanted = Configuration.led_by(voter.me, [*present, *caught_up])
        # Not while those that are left are no quorum of it: first the others must be declared lost.
        limit = now - self._timing.quorum_lease
        reached = [name for name, peer in self._peers.items() if peer.acked > limit]
        if wanted != voters.new and wanted.is_quorum([voter.me, *reached]):
            self._append(msg.VotersChanged(Voters(wanted, voters.new)))

    def _kept(self, name: str) -> float:
        """Up to here a voter has the configurations on disk. The new voters decide alone only when
        a quorum of the old ones has kept who they are: whoever finds that the old ones can decide
        nothing any more then learns it from one of them. Until then, both decide together. So
        nothing but the change waits for the disks, which may take longer than a lease.
        """
        if name == self._voter.me:
            return self._voter.kept
        return self._peers[name].kept if name in self._peers else 0

    def _learners(self, now: float) -> list[str]:
        """The hosts that are to become voters: in the order in which they joined."""
        voters = self.voters.new.voters
        places = MAX_VOTERS - sum(name not in self._voter.table.gone for name in voters)
        sessions = (host for host in self._voter.table.sessions if host not in voters)
        present = (host for host in sessions if self.leases.is_present(host, now))
        return list(itertools.islice(present, max(places, 0)))

    def successor(self, now: float) -> str | None:
        """A voter that can take over: it has the whole log, and was heard a moment ago."""
        log, gone = self._voter.log, self._voter.table.gone
        limit = now - self._timing.quorum_lease
        for name in sorted(self.voters.new.voters):
            peer = self._peers.get(name)
            if peer is None or name in gone or name in self.leases.losing:
                continue
            if peer.match == log.last and peer.acked > limit:
                return name
        return None
