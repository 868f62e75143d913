"""This host in the group: drives its node, follows the chain, and talks with the other agents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from outlast.coordination.replicated import messages as consensus
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.coordination.replicated.quorum import NEVER, Voters
from outlast.coordination.replicated.table import entry_key
from outlast.launch.event_loop import EventLoop, Timer
from outlast.launch.hosts.host_group import Chain, objection
from outlast.launch.hosts.named_hosts import NoSuchHost, asked_of
from outlast.launch.hosts.plan import Asked
from outlast.launch.hosts.replicated import messages
from outlast.launch.hosts.replicated.founding import ANNOUNCE_S
from outlast.launch.hosts.replicated.messages import Message
from outlast.launch.hosts.replicated.past import Config, Group
from outlast.launch.hosts.replicated.peer_connections import Address, Peer, PeerConnections
from outlast.launch.hosts.replicated.record import Record
from outlast.system.lease_page import LeasePage

Done = Callable[[Result], None]
_log = logging.getLogger(__name__)

ANNOUNCERS = 7
"""How many hosts, the longest in the group, announce it: as many as there are voters. Not only the
leader, whose death must not make a restarted endpoint believe that there is no group.
"""
_AT_ONCE = 64
"""How many entries of the chain are read in one operation."""
_OVER = "this host has left the group"


class ChainFollower:
    """Receives the chain of the group: what there is in a few reads, then one entry after another.
    `submit`: starts a store operation; the second argument is called with its result.
    """

    def __init__(
        self, submit: Callable[[Operation, Done], object], changed: Callable[[], None]
    ) -> None:
        self.chain = Chain()
        self.caught_up = False
        self._submit, self._changed = submit, changed
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._read()

    def _read(self) -> None:
        first = len(self.chain.entries) + 1
        parts = tuple(Operation("read", entry_key(n)) for n in range(first, first + _AT_ONCE))
        self._submit(Operation("batch", operations=parts), self._found)

    def _found(self, result: Result) -> None:
        if not isinstance(result, list):
            return  # the lease is over
        found = [entry for entry in result if isinstance(entry, bytes)]
        for entry in found:
            self.chain.append(entry)
        if len(found) == _AT_ONCE:
            self._read()
            return
        self.caught_up = True
        self._changed()
        self._await_next()

    def _await_next(self) -> None:
        # An entry that has come meanwhile is there: then this returns at once.
        key = entry_key(len(self.chain.entries) + 1)
        self._submit(Operation("wait_for", key), self._came)

    def _came(self, result: Result) -> None:
        if isinstance(result, bytes):  # otherwise the lease is over
            self.chain.append(result)
            self._changed()
            self._await_next()


class Membership:
    """From the admission of this host until it leaves, or its lease is over.

    Args:
        group: the id of the host that founded the group.
        endpoints: the addresses of the endpoints other than this host.
        page: gets the leases of this host.
        ended: called once, with the reason; it is empty if this host has left in order.
        host_refused: called with a line about a host that was not admitted.
    """

    def __init__(
        self,
        loop: EventLoop,
        peers: PeerConnections,
        me: HostInfo,
        node: Node,
        group: str,
        generation: int,
        record: Record,
        endpoints: Iterable[Address],
        known: Iterable[HostInfo],
        page: LeasePage,
        changed: Callable[[], None],
        ended: Callable[[str], None],
        host_refused: Callable[[str], None],
    ) -> None:
        self.group, self._generation, self._record = group, generation, record
        self._recorded: object = None
        self.leader = ""
        self.term = 0
        self._loop, self._peers, self._me, self._node = loop, peers, me, node
        self._endpoints = tuple(endpoints)
        self._addresses = {host.id: (host.address, host.port) for host in (me, *known)}
        self._page, self._changed, self._ended = page, changed, ended
        self._host_refused = host_refused
        self._done: dict[int, Done] = {}
        self._joining: dict[str, Peer] = {}  # those that the leader waits to see in the chain
        self._lease_until = NEVER
        # A host that gets no lease until then is lost, if the leader that has admitted it lives. It
        # may have died at once, with all who knew of this host: then nobody will ever come.
        self._lease_by = loop.clock.now() + 2 * node.timing.lost_after
        # whether it has ended because it never had a lease: the leader has not come back since it
        # has admitted this host
        self.unheard = False
        self._over = False
        self._submitted = False
        self._leaving = False
        self.asked: tuple[Asked, ...] = ()  # what `outlast drain` has asked of this host
        self._tick_soon = True
        self._admits_itself = group == me.id  # the founder
        self._timer = Timer(self.pump)
        self._timer_at = float("inf")
        self._follower = ChainFollower(self.submit, self._chain_changed)
        self.chain = self._follower.chain
        self._announce()

    # ------------------------------------------------------------------ operations (`Upstream`)
    def submit(self, operation: Operation, done: Done) -> int:
        """Start an operation; `done` is called later, from the loop, with its result."""
        if self._over:
            done(Failed(_OVER))
            return -1
        ticket = self._node.submit(operation, self._loop.clock.now())
        self._done[ticket] = done
        self._submitted = True
        return ticket

    def cancel(self, handle: object) -> None:
        if isinstance(handle, int) and self._done.pop(handle, None) is not None:
            self._node.cancel(handle)
            self._submitted = True

    # ------------------------------------------------------------------ the loop
    def pump(self) -> None:
        """Do what is due; called after every round of the loop.

        The lease is looked at first. A process that was stopped for longer than its lease handles
        what it finds in its sockets before this is called, but nothing leaves it except through
        `outbox` and `results` below: a host without a lease neither sends nor answers.
        """
        while not self._over:
            now = self._loop.clock.now()
            if now > self._lease_until > NEVER:
                late_s = now - self._lease_until
                leader = self.chain.plan.hosts.get(self.leader)
                unheard = f"the leader {leader}" if leader else "a leader"
                if self.leader == self._me.id:
                    unheard = "more than half of the hosts"
                self._end(
                    f"its lease ended {late_s:.1f} s ago: it was stopped, or could not reach "
                    f"{unheard}"
                )
                return
            if self._lease_until == NEVER and now > self._lease_by:
                self.unheard = True
                self._end("no leader of the group has answered since this host was admitted")
                return
            if now >= self._node.next_tick() or self._tick_soon:
                self._tick_soon = False
                self._node.tick(now)
            self._submitted = False
            if self._admits_itself:
                # Refused only in the first round, in which the founder's term begins.
                self._admits_itself = not self._node.add_host(self._me, now)
                self._submitted = True
            sending = self._node.outbox()
            self._page.renew_reads(self._node.host.covered, self._node.host.reads_until)
            self._keep_voters()
            for host, message in sending:
                payload = messages.Replicated(self.group, host, consensus.encode(message))
                self._peers.send(host, self._addresses.get(host), payload)
            for ticket, result in self._node.results():
                done = self._done.pop(ticket, None)
                if done is not None:
                    done(result)
            self._observe()
            if not self._submitted and not self._tick_soon:
                break
        if not self._over:
            self._schedule()

    def receive(self, peer: Peer, message: Message) -> None:
        if isinstance(message, messages.Replicated):
            if (message.group, message.receiver) == (self.group, self._me.id):
                self._addresses.setdefault(peer.host.id, (peer.host.address, peer.host.port))
                self._receive(peer, message.data)
        elif isinstance(message, messages.Find | messages.AskGrant):
            peer.send(self._introduction())
        elif isinstance(message, messages.Join):
            self._join_asked(peer)
        elif isinstance(message, messages.Drain):
            self._drain(peer, message)
        elif isinstance(message, messages.Member) and message.group != self.group:
            self._other_group(message)

    def leave(self, reason: str) -> None:
        """Leave in order; `ended` is called when the others can do without this host."""
        if not self._over:
            self._leaving = True
            self._node.leave(reason, self._loop.clock.now())

    def close(self) -> None:
        """Stop, without a word to the others."""
        self._end(_OVER)

    # ------------------------------------------------------------------ parts
    def _receive(self, peer: Peer, data: bytes) -> None:
        try:
            message = consensus.decode(data)
        except ValueError as e:
            _log.warning("host %s sent what no agent sends: %s", peer.host.name, e)
            return
        self._node.receive(peer.host.id, message, self._loop.clock.now())

    def _keep_voters(self) -> None:
        """Makes a new configuration durable; until then no change of voters is completed by it."""
        found = self._node.configurations
        if not found or found == self._recorded:
            return
        self._recorded = found

        def wrote() -> None:
            if not self._over:
                self._node.wrote(found)

        past = self._record.past.with_group(self._known(found))
        self._record.set_later(past, lambda: self._loop.call_from_thread(wrote))

    def _known(self, found: tuple[tuple[int, Voters, bool], ...]) -> Group:
        configs = [Config(index, voters) for index, voters, _ in found]
        agreed = found[0][2]
        voters = frozenset().union(*(config.voters.all for config in configs))
        return Group(
            self.group,
            self._generation,
            configs[0] if agreed else Config(-1, configs[0].voters),
            tuple(configs[1:] if agreed else configs),
            {host: where for host, where in self._addresses.items() if host in voters},
        )

    def _observe(self) -> None:
        own = self._node.host
        if own.refused is not None:
            left = own.refused.orderly and self._leaving
            self._end("" if left else f"the others went on without it: {own.refused.reason}")
            return
        leader = own.leader or ""
        if own.until != self._lease_until:
            self._lease_until = own.until
            if self._lease_until > NEVER:
                self._follower.start()  # before, no leader would answer
                self._page.renew(self._lease_until)
                self._changed()
        if (leader, own.term) != (self.leader, self.term):
            self.leader, self.term = leader, own.term
            self._changed()

    def _schedule(self) -> None:
        lease_end = self._lease_until if self._lease_until > NEVER else self._lease_by
        due = min(self._node.next_tick(), lease_end)
        # A timer that is early costs less than one for each round of the loop.
        if self._timer.pending and self._timer_at <= due:
            return
        self._timer.cancel()
        if due < float("inf"):
            self._timer_at = due
            delay_s = max(0.0, due - self._loop.clock.now())
            self._timer = self._loop.call_later(delay_s, lambda: None)

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        failed = Failed(reason or _OVER)
        waiting, self._done = self._done, {}
        for done in waiting.values():
            done(failed)
        self._ended(reason)

    # ------------------------------------------------------------------ the other hosts
    def _chain_changed(self) -> None:
        hosts = self.chain.plan.hosts
        self._addresses |= {h.id: (h.address, h.port) for h in hosts.values()}
        for host in self.chain.plan.lost:
            self._addresses.pop(host, None)
        self._tick_soon = True  # the leader has something to announce
        for host in [host for host in self._joining if host in hosts]:
            self._admit(self._joining.pop(host))
        self._changed()

    def _introduction(self) -> messages.Member:
        leader = self._me if self.leader == self._me.id else self.chain.plan.hosts.get(self.leader)
        found = self._node.configurations
        known = self._known(found) if found else None
        return messages.Member(
            self.group, self._generation, leader, len(self.chain.plan.hosts), known
        )

    def _join_asked(self, peer: Peer) -> None:
        candidate = peer.host
        if not self._node.elected:
            introduction = self._introduction()
            if introduction.leader is None or introduction.leader.id == self._me.id:
                peer.send(messages.NotYet("the group is choosing a leader"))
            else:
                peer.send(introduction)
            return
        if not self._follower.caught_up:
            return  # it asks again
        # One that was lost before it heard of its admission never comes back under its id. Told
        # now, it has no lease, and joins again as another host.
        if candidate.id in self.chain.plan.lost or candidate.id in self.chain.plan.hosts:
            self._admit(peer)
            return
        hosts, limit_s = self.chain.plan.hosts.values(), self._node.timing.lost_after
        no = objection(candidate, self._me, hosts, limit_s)
        if no is not None and no.limit_s:
            peer.send(messages.NotYet(no.reason, no.limit_s))
            return
        if no is not None:
            peer.send(messages.Refused(no.reason))
            self._host_refused(no.reason)
            return
        self._addresses[candidate.id] = (candidate.address, candidate.port)
        if self._node.add_host(candidate, self._loop.clock.now()):
            self._joining[candidate.id] = peer

    def _admit(self, peer: Peer) -> None:
        first = list(itertools.islice(self.chain.plan.hosts.values(), ANNOUNCERS))
        peer.send(messages.Admitted(self.group, self._generation, self._me.id, (self._me, *first)))

    def _drain(self, peer: Peer, message: messages.Drain) -> None:
        if not self._follower.caught_up:
            return  # it asks again
        try:
            wanted = message.hosts, message.rank, message.reason
            found = asked_of(self.chain.plan, *wanted, peer.host.id)
        except NoSuchHost as e:
            peer.send(messages.Drained((), str(e)))
            return
        self.asked += tuple(found.values())
        self._changed()
        peer.send(messages.Drained(tuple(found)))

    def _announce(self) -> None:
        if self._over:
            return
        self._loop.call_later(ANNOUNCE_S, self._announce)
        first = itertools.islice(self.chain.plan.hosts, ANNOUNCERS)
        if self.leader == self._me.id or self._me.id in first:
            for address in self._endpoints:
                self._peers.send_to(address, self._introduction())

    def _other_group(self, other: messages.Member) -> None:
        """Two groups of one run have met, see `founding`. The older one goes on: it has kept the
        quorum of all before it. Of two that were founded at the same time, the larger one.
        """
        # Compared in this order; the id decides for both in the same way.
        mine = (-self._generation, len(self.chain.plan.hosts), self.group)
        theirs = (-other.generation, other.hosts, other.group)
        if self._follower.caught_up and mine < theirs:
            where = f", led by {other.leader.name}" if other.leader is not None else ""
            which = "is older" if other.generation < self._generation else "goes on"
            self._end(f"there is another group with this run id{where}, which {which}")
