"""One host's part in the replicated store: the only class that the host service needs."""

from __future__ import annotations

import random

from outlast.coordination.replicated import messages as msg
from outlast.coordination.replicated.election import Campaigns, Election
from outlast.coordination.replicated.hosts import HostInfo, HostJoined, HostLost
from outlast.coordination.replicated.leader import Leader
from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.own_host import OwnHost
from outlast.coordination.replicated.quorum import NEVER, Configuration, Timing, Voters
from outlast.coordination.replicated.voter import KEPT, Voter


class Node:
    """One host's part in the group. No change of voters is completed before `wrote` has said that a
    quorum has the configurations on disk.

    Drive it like this, from one thread::

        node.receive(sender, message, now)      # for each message that has arrived
        node.submit(operation, now)             # for each new operation
        node.tick(now)                          # at `next_tick()` at the latest
        for receiver, message in node.outbox(): # after any of these, once per round
            ...
        for ticket, result in node.results():   # after `outbox`
            ...

    `now` is read from a monotonic clock after the message was taken from its connection: a lease
    that is valid at `now` was valid after the request was sent.

    `host` has what this host may do, and whom it follows.

    Args:
        me: the id of this host, unique for this process: it never comes back.
        founding: the configuration of the founder: itself. `None` for all others; they become part
            of the job when the leader calls `add_host` for them.
        kept: how many entries of the log are kept at least for voters that lag behind; a voter that
            lags further gets the whole table.
    """

    def __init__(
        self,
        me: str,
        timing: Timing,
        rng: random.Random,
        *,
        founding: Configuration | None,
        kept: int = KEPT,
    ) -> None:
        self.me, self.timing = me, timing
        self._voter = Voter(me, timing, founding, kept)
        self.host = OwnHost(me, timing, founder=founding is not None)
        self._campaigns = Campaigns(self._voter, rng)
        self._election: Election | None = None
        self._leader: Leader | None = None
        self._began = False
        self._leaving: tuple[str, float] | None = None
        self._outbox: list[tuple[str, msg.Message]] = []
        self._now = self._ticked = NEVER

    # ------------------------------------------------------------------ state
    @property
    def elected(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._leader is not None

    @property
    def leads(self) -> bool:
        """Whether this node leads, and no other leader can have been elected yet."""
        leader = self._leader
        return leader is not None and leader.ready and leader.lease_valid(self._now)

    @property
    def voters(self) -> frozenset[str]:
        """The voters, if this host knows: none while they change, or where it never was a voter."""
        log = self._voter.log
        if log.voters is None or log.voters.old or log.voters_index > self._voter.commit:
            return frozenset()
        return log.voters.new.voters

    @property
    def configurations(self) -> tuple[tuple[int, Voters, bool], ...]:
        """All that may be in force, each with its entry and whether that is agreed on: at first the
        latest that is. None on a host that never was a voter.
        """
        return self._voter.log.configurations(self._voter.commit)

    def wrote(self, configurations: tuple[tuple[int, Voters, bool], ...]) -> None:
        told = self._voter.wrote(frozenset((index, voters) for index, voters, _ in configurations))
        if told is not None:
            self._outbox.append(told)

    # ------------------------------------------------------------------ time and messages
    def tick(self, now: float) -> None:
        self._now = self._ticked = now
        leader = self._leader
        if leader is not None and not leader.has_quorum(now):
            self._stop_leading()
        elif leader is not None:
            self._renew(leader)
            leader.end_leases(now)
            self._announce(leader)
            self._hand_over(leader)
        elif now >= self._campaigns.due() and self._may_lead():
            self._campaign(pre_vote=True)
        self.host.check_lease(now)

    def _announce(self, leader: Leader) -> None:
        for host in leader.leases.announce_to(self._now):
            self._outbox.append((host, msg.Announce(leader.term)))

    def _renew(self, leader: Leader) -> None:
        """The lease of the leader's own host counts from the moment that a quorum has answered."""
        if leader.ready and self.me not in leader.leases.losing:
            granted = leader.read_leases.granted(self.me)
            self.host.extend(leader.quorum_heard(self._now), granted)

    def next_tick(self) -> float:
        """When `tick` is due at the latest."""
        if self._leader is not None:
            return min(self._ticked + self.timing.append_interval, self.host.due())
        campaign = self._campaigns.due() if self._may_lead() else float("inf")
        lease_end = self.host.until if self.host.until > self._now else float("inf")
        return min(campaign, self.host.due(), lease_end)

    def receive(self, sender: str, message: msg.Message, now: float) -> None:
        self._now = now
        voter = self._voter
        if isinstance(message, msg.Append | msg.Snapshot):
            self._outbox.append((sender, voter.follow(sender, message, now)))
        elif isinstance(message, msg.VoteAnswer):
            # A pre-vote is granted with the term that was asked for, in which nobody is yet.
            asked_for = message.pre_vote and message.granted
            if message.term > voter.term and not asked_for:
                voter.enter(message.term)
            elif self._election is not None:
                self._election.take(sender, message, now)
        elif isinstance(message, msg.AppendAnswer) and message.term > voter.term:
            voter.enter(message.term)
        elif isinstance(message, msg.VoteRequest):
            self._vote(sender, message)
        elif isinstance(message, msg.Handover):
            if (message.term, sender) == (voter.term, voter.leader) and self._may_lead():
                self._campaign(pre_vote=False, handover=True)
        elif isinstance(message, msg.Announce | msg.Grant | msg.Answers | msg.Refusal | msg.Recall):
            self.host.receive(sender, message, voter.term, now)
        elif self._leader is not None:
            self._lead(self._leader, sender, message)
        elif sender in voter.table.gone:
            self._refuse(sender)
        self._check_role()

    def outbox(self) -> list[tuple[str, msg.Message]]:
        """The messages to send, each with its receiver; taken. Ends a round of inputs."""
        for message in self.host.messages(self._now):
            assert self.host.leader is not None
            if self.host.leader != self.me:
                self._outbox.append((self.host.leader, message))
            elif self._leader is not None:
                self._lead(self._leader, self.me, message)
            if self.host.is_out_of_touch(self._now) and isinstance(
                message, msg.Heartbeat | msg.Leave
            ):
                # This host may have been removed, and so may the leader: every voter can say so.
                self._outbox += [(name, message) for name in self._voter.others]
        if self._leader is not None:
            self._outbox += self._leader.round(self._now)
        self._apply()
        taken, self._outbox = self._outbox, []
        return taken

    # ------------------------------------------------------------------ operations of this host
    def submit(self, operation: Operation, now: float) -> int:
        """Starts an operation; returns its ticket. It is performed exactly once."""
        self._now = now
        return self.host.submit(operation, now)

    def results(self) -> list[tuple[int, Result]]:
        """The tickets of finished operations with their results; taken.

        A result may be `Failed` once the lease is over; the operation may have been performed.
        """
        return self.host.requests.results()

    def cancel(self, ticket: int) -> None:
        """Forgets an operation, without a result. For waits: others may still be performed."""
        self.host.requests.cancel(ticket)

    # ------------------------------------------------------------------ hosts
    def add_host(self, info: HostInfo, now: float) -> bool:
        """Admits a host if this node leads; whether it does. Repeat it until it has joined."""
        self._now = now
        if self._voter.log.last == 0:
            self.tick(now)  # the founder leads from its first moment
        if self._leader is None:
            return False
        self._leader.propose(HostJoined(info))
        return True

    def leave(self, reason: str, now: float) -> None:
        """Leaves in order. Call it when all workers of this host have ended, and go on to drive
        this node until `refused` is set, with `orderly`: then the others can do without it.
        """
        self._now = now
        self._leaving = self._leaving or (reason, now)
        self.host.leave(reason)

    def _hand_over(self, leader: Leader) -> None:
        """A leader that leaves: another takes over first. If there is none, it is the last host."""
        if self._leaving is None or not leader.ready:
            return
        reason, since = self._leaving
        log = self._voter.log
        if list(self._voter.table.sessions) == [self.me]:
            # Not before all others have been told, which may depend on the voters.
            alone = leader.voters.all == {self.me} and log.voters_index <= self._voter.commit
            if alone and not leader.leases.departing:
                leader.propose(HostLost(self.me, reason, left=True))
        elif self._now >= max(since, leader.elected) + 2 * self.timing.heartbeat:
            # Not at once: all may leave at the same time, and a host that leaves must not lead.
            successor = leader.successor(self._now)
            if successor is not None:
                # From here on this leader does not act: it reads nothing, and grants no lease.
                self._stop_leading()
                self._voter.heard = self._now
                self._outbox.append((successor, msg.Handover(leader.term)))

    # ------------------------------------------------------------------ elections
    def _may_lead(self) -> bool:
        return self._leader is None and self.host.refused is None and self._campaigns.possible

    def _campaign(self, *, pre_vote: bool, handover: bool = False) -> None:
        self._election = self._campaigns.begin(self._now, pre_vote=pre_vote, handover=handover)
        request = self._election.request
        self._outbox += [(name, request) for name in self._voter.others]
        self._check_role()

    def _vote(self, sender: str, asked: msg.VoteRequest) -> None:
        if sender in self._voter.table.gone:
            self._refuse(sender)
            return
        if asked.pre_vote and self._election is not None and self._election.pre_vote:
            # Two that ask at the same time would both get a majority, and then split the votes of
            # one term. The later of the two in the order gives way.
            if self._election.precedes(sender, asked, self._now):
                return
            self._election = None
        answer = self._voter.answer_vote(sender, asked, self._now, leads=self.leads)
        if answer is not None:
            self._outbox.append((sender, answer))

    def _check_role(self) -> None:
        """After each message: another term, or another leader, ends what this node was."""
        voter = self._voter
        if self._leader is not None and self._leader.term != voter.term:
            self._stop_leading()
        election = self._election
        if election is None:
            return
        if election.is_over(self._now):
            self._election = None
        elif election.won and election.pre_vote:
            self._campaign(pre_vote=False)
        elif election.won:
            previous = voter.log.author
            heard = election.predecessor_heard()
            predecessor = None if previous in (None, self.me) else (previous, heard)
            self._election = None
            self._leader = Leader(voter, self._now, predecessor)
            self._began = False

    def _stop_leading(self) -> None:
        # A vote for a successor counts as one of a voter that this leader was in reach of.
        self._voter.voted_at = self._now
        self._voter.leader = None
        self._leader = None

    # ------------------------------------------------------------------ the leader
    def _lead(self, leader: Leader, sender: str, message: msg.Message) -> None:
        table = self._voter.table
        if isinstance(message, msg.AppendAnswer):
            if message.term == leader.term:
                leader.answered(sender, message)
        elif sender in table.gone:
            self._refuse(sender)
        elif not leader.ready or sender not in table.sessions:
            return  # it is told when this leader is ready, and sends it again
        elif isinstance(message, msg.Heartbeat):
            leader.leases.hear(sender, self._now)
            leader.read_leases.confirm(sender, message.covered)
            may_act = sender != self.me and sender not in leader.leases.losing
            if may_act and leader.lease_valid(self._now):
                covered = leader.read_leases.granted(sender)
                self._outbox.append((sender, msg.Grant(leader.term, message.sent, covered)))
        elif isinstance(message, msg.Requests):
            leader.serving.take(sender, message, lease_valid=leader.lease_valid(self._now))
        elif isinstance(message, msg.Leave) and sender != self.me:
            leader.leases.hear(sender, self._now)
            leader.propose(HostLost(sender, message.reason, left=True))

    def _refuse(self, host: str) -> None:
        """Tells a host that it is out; one that leaves, only when it is no voter any more: until
        then the voters may need it to agree on that.
        """
        gone = self._voter.table.gone[host]
        log = self._voter.log
        voters = log.voters
        settled = voters is None or (
            log.voters_index <= self._voter.commit and host not in voters.all
        )
        alone = voters is not None and voters.all == {host}
        if gone.left and not settled and not alone:
            return
        if host == self.me:
            self.host.refuse(msg.Refusal(gone.reason, gone.left))
        else:
            self._outbox.append((host, msg.Refusal(gone.reason, gone.left)))

    def _apply(self) -> None:
        performed = self._voter.apply()
        leader = self._leader
        if leader is not None:
            if leader.ready and not self._began:
                self._began = True
                others = [host for host in self._voter.table.sessions if host != self.me]
                leader.leases.begin(others)
                leader.read_leases.begin(self._voter.table)
                self._announce(leader)
                self.host.follow(self.me, leader.term, self._now)
                self._renew(leader)
            if self._began:
                leader.read_leases.follow(self._voter.table)
            self.host.learn(self._voter.table.state.covered)
            for change, results in performed:
                leader.serving.performed(change, results)
                self._follow_up(leader, change)
            for host in leader.read_leases.to_tell(self._now):
                self._outbox.append((host, msg.Recall(leader.read_leases.covered)))
            for host, answers in leader.serving.answers():
                if host == self.me:
                    self.host.requests.answered(answers)
                else:
                    self._outbox.append((host, msg.Answers(answers)))
            if self.me in self._voter.table.gone:
                self._stop_leading()
                self._refuse(self.me)
        self._voter.table.appeared.clear()

    def _follow_up(self, leader: Leader, change: msg.Change) -> None:
        gone = self._voter.table.gone
        if isinstance(change, HostJoined) and change.info.id == self.me:
            self.host.requests.send_again(self._now)
        elif isinstance(change, HostJoined) and change.info.id not in gone:
            leader.leases.admitted(change.info.id, self._now)
            self._outbox.append((change.info.id, msg.Announce(leader.term)))
        elif isinstance(change, HostLost) and change.host != self.me:
            leader.leases.removed(change.host)
            leader.serving.removed(change.host)
            leader.read_leases.removed(change.host)
            if change.host in leader.voters.all:
                leader.leases.departing.add(change.host)
            self._refuse(change.host)
        elif isinstance(change, msg.VotersChanged) and change.voters.old is None:
            for host in leader.leases.departing:
                self._refuse(host)
            leader.leases.departing.intersection_update(change.voters.all)
