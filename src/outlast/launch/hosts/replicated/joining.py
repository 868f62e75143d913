"""How a host gets into the group: it finds or founds the group, and asks the leader to admit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.event_loop import EventLoop, Timer
from outlast.launch.hosts.replicated import messages
from outlast.launch.hosts.replicated.endpoints import Endpoint
from outlast.launch.hosts.replicated.founding import FIND_S, Founding
from outlast.launch.hosts.replicated.messages import Admitted, Message, NotYet
from outlast.launch.hosts.replicated.past import Past
from outlast.launch.hosts.replicated.peer_connections import Address, Peer, PeerConnections
from outlast.launch.hosts.replicated.record import Record


class Joining:
    """Runs from the start of the service until this host is admitted or refused.

    Args:
        own: the index of this host among the endpoints, or -1.
        lost_after_s: how long a host of a group may be silent.
        founded: called when this host founds the group.
        admitted: called when a leader has admitted this host.
        refused: called with the reason when this host must not join.
    """

    def __init__(
        self,
        loop: EventLoop,
        peers: PeerConnections,
        endpoints: Sequence[Endpoint],
        own: int,
        me: HostInfo,
        lost_after_s: float,
        record: Record,
        founded: Callable[[], None],
        admitted: Callable[[Peer, Admitted], None],
        refused: Callable[[str], None],
    ) -> None:
        self.endpoints = list(endpoints)
        self._loop, self._peers, self._own, self._founded = loop, peers, own, founded
        self._admitted, self._refused, self._me = admitted, refused, me
        self._lost_after_s, self._record = lost_after_s, record
        self._founding: Founding | None = None
        if own >= 0:
            now = loop.clock.now()
            self._founding = Founding(len(endpoints), own, me.id, now, lost_after_s, record)
        self._forgetful: dict[str, float] = {}
        self._target: HostInfo | None = None  # that is asked for admission
        self._unreached, self._unreached_until = "", 0.0  # the last one, for as long as it is news
        self._target_until = 0.0
        self._waiting: NotYet | None = None
        self._waiting_since = self._waiting_until = 0.0  # it is news until then
        self._over = False
        self._timer = Timer(self._step)
        self._step()

    def close(self) -> None:
        self._over = True
        self._timer.cancel()

    def problem(self) -> str:
        if self._loop.clock.now() < self._unreached_until:
            return self._unreached
        if self._waiting is not None and self._loop.clock.now() < self._waiting_until:
            return self._waiting.reason
        problems = []
        missing = {
            f"{host.rpartition('-')[0] or host} ({address})"
            for host, (address, _) in self._record.past.waits_for().items()
        }
        if missing:
            problems.append(
                "the last group of this run may still act, because these hosts have not been heard "
                f"of: {', '.join(sorted(missing))}; if one is down, start outlast run there again "
                "(if they never come back, start the job under another --rdzv-id)"
            )
        for index, endpoint in enumerate(self.endpoints):
            if index == self._own:
                holder = self._founding.holder() if self._founding is not None else None
                if holder is not None and holder != self._own:
                    where = self.endpoints[holder]
                    problems.append(f"{endpoint}: this host, which waits for {where} to found")
                elif len(self.endpoints) > 1:
                    problems.append(f"{endpoint}: this host, too few other endpoints answer")
            elif endpoint.address is None:
                problems.append(f"{endpoint}: {endpoint.problem}")
            else:
                failure = self._peers.failure(endpoint.address)
                problems.append(f"{endpoint}: {failure or 'it has not joined a group itself'}")
        return "; ".join(problems)

    def receive(self, peer: Peer, message: Message) -> None:
        founding = self._founding
        if isinstance(message, messages.Find):
            self._learn(peer, message.past)
            peer.send(messages.Fresh(self._own, self._record.past))
        elif isinstance(message, messages.Join):
            peer.send(NotYet(f"{peer.host.name} waits for the group to be founded"))
        elif isinstance(message, messages.Fresh):
            self._learn(peer, message.past)
            if founding is not None and 0 <= message.endpoint < len(self.endpoints):
                founding.is_fresh(message.endpoint, self._loop.clock.now())
        elif isinstance(message, messages.AskGrant):
            self._learn(peer, message.past)
            address = (peer.host.address, peer.host.port)
            if founding is None:
                return
            grants = founding.would_grant(peer.host.id, message.past)
            if message.sure:
                grants = founding.asked(
                    message.endpoint, message.attempt, peer.host.id, address, message.past
                )
            if grants:
                peer.send(messages.Grant(self._own, message.attempt, message.sure))
        elif isinstance(message, messages.Grant):
            if founding is not None:
                if message.sure:
                    founding.granted(message.endpoint, message.attempt)
                elif not founding.would_get(message.endpoint, self._loop.clock.now()):
                    return  # too few so far: the next step asks again
                self._try_founding()
        elif isinstance(message, messages.Member):
            if founding is not None:
                founding.heard_of_group(self._loop.clock.now())
                if message.known is not None:
                    founding.learned(Past(groups=(message.known,)))
            leader = message.leader if message.leader is not None else peer.host
            # This host itself, under the id that it had before: the sender does not know yet.
            if _at(leader) != _at(self._me):
                self._ask(leader)
        elif isinstance(message, NotYet):
            self._wait(message)
        elif isinstance(message, messages.Refused):
            self._end(lambda: self._refused(message.reason))
        elif isinstance(message, Admitted):
            self._end(lambda: self._admitted(peer, message))

    def _learn(self, peer: Peer, past: Past) -> None:
        """Another agent, which is in no group, has told what it knows.

        It also is the proof that the agent before it at its address has ended. If it does not know
        so itself, its disk has lost the record, and with it what that agent knew of its group. Then
        it counts only when there would have been news of a group that lives.

        An agent listens at the port of an endpoint, and then so does the one after it; or at any
        free port, because it is no endpoint or another agent has that port. So at the address of an
        endpoint, only an agent with the same port proves something.
        """
        if self._founding is None:
            return
        now = self._loop.clock.now()
        fixed = {endpoint.address for endpoint in self.endpoints}
        here, forgotten = (peer.host.address, peer.host.port), []
        for host, where in self._record.past.merged(past).waits_for().items():
            follows = here == where or (here[0] == where[0] and where not in fixed)
            if not follows or host == peer.host.id:
                continue
            if now >= self._forgetful.setdefault(host, now) + self._lost_after_s:
                forgotten.append(host)
        self._founding.learned(past.with_out(forgotten))

    def _step(self) -> None:
        if self._over:
            return
        self._timer = self._loop.call_later(FIND_S, self._step)
        if self._none_can_be_met():
            self._end(lambda: self._refused(self.problem()))
            return
        if self._target is not None:
            late = self._loop.clock.now() > self._target_until
            failure = self._peers.failure(_at(self._target))
            if not late and not failure:
                self._peers.send_to(_at(self._target), messages.Join())
                return
            if failure:
                leader = f"{self._target.name} ({self._target.address}), the leader of the group"
                self._unreached = f"this host cannot reach {leader}: {failure}"
                self._unreached_until = self._loop.clock.now() + self._lost_after_s
            self._target = None  # it has gone, or is no leader any more: ask the endpoints again
        self._tell_endpoints(messages.Find(self._record.past))
        endpoints = {endpoint.address for endpoint in self.endpoints}
        for address in {*self._record.past.waits_for().values()} - endpoints:
            if self._founding is not None:
                self._peers.send_to(address, messages.Find(self._record.past))
        self._try_founding()

    def _none_can_be_met(self) -> bool:
        """Whether no group can take this host, because of the secrets, run ids or versions.

        Nobody knows which of two is the right one. A host without an endpoint can go on if one
        endpoint has the same, or may have it; an endpoint itself, as long as those can found a
        group: so what is wrong on one endpoint of three ends that one, and not the other two.
        """
        differ = {i for i, e in enumerate(self.endpoints) if self._peers.differs(e.address)}
        if self._founding is not None:
            return bool(differ) and not self._founding.is_enough(differ)
        return bool(differ) and len(differ) == len(self.endpoints)

    def _ask(self, leader: HostInfo) -> None:
        if self._target is None or _at(self._target) != _at(leader):
            self._target = leader
            self._target_until = self._loop.clock.now() + 2 * self._lost_after_s
            self._peers.send_to(_at(leader), messages.Join())

    def _wait(self, answer: NotYet) -> None:
        self._unreached_until = 0.0
        now = self._loop.clock.now()
        if self._waiting is None or self._waiting.limit_s != answer.limit_s:
            self._waiting_since = now
        self._waiting, self._waiting_until = answer, now + self._lost_after_s
        if answer.limit_s:
            self._target_until = now + 2 * self._lost_after_s
        if answer.limit_s and now > self._waiting_since + answer.limit_s:
            self._end(lambda: self._refused(answer.reason))

    def _try_founding(self) -> None:
        founding, now = self._founding, self._loop.clock.now()
        if self._over or self._target is not None or founding is None:
            return
        founding.withdraw(now)
        if not founding.candidate(now):
            return
        if founding.founds():
            self._end(self._founded)
        elif founding.candidate(now):
            self._tell_endpoints(
                messages.AskGrant(
                    self._own, founding.attempt, self._record.past, founding.sure(now)
                )
            )

    def _tell_endpoints(self, message: Message) -> None:
        for index, endpoint in enumerate(self.endpoints):
            if index != self._own and endpoint.address is not None:
                self._peers.send_to(endpoint.address, message)

    def _end(self, result: Callable[[], None]) -> None:
        if not self._over:
            self.close()
            result()


def _at(host: HostInfo) -> Address:
    return host.address, host.port
