"""The connections of simulated launchers, with the end of each as TCP tells it.

A message on a link that is cut is sent again until the sender has had no acknowledgement for as
long as its patience; then the sender's end alone is gone. So the end of a connection proves little:
it follows the death of a process, but also a handshake whose answer was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.hosts.replicated.messages import Message, decode, encode

if TYPE_CHECKING:
    from simulation.hosts.simulated_launcher import SimulatedLauncher

Address = tuple[str, int]
_AGAIN_S = 0.2


class End:
    """One launcher's end of a connection: its `Peer`."""

    def __init__(self, owner: SimulatedLauncher, host: HostInfo) -> None:
        self.owner = owner
        self.host = host
        self.far: End
        self.open = True

    def links(self) -> tuple[bool, bool]:
        """Whether something arrives there, and whether something arrives here."""
        here, there = self.owner.machine.name, self.far.owner.machine.name
        cut = self.owner.world.cut
        return (here, there) not in cut, (there, here) not in cut

    def send(self, message: Message) -> None:
        """Sends a message, which may be lost, late, or there twice."""
        if not self.open:
            return
        world = self.owner.world
        world.sent(self.owner, self.host.id, message)
        plan, r = world.schedule, world.random
        if r.random() >= plan.loss:
            payload = encode(message)
            self._transmit(payload, world.now)
            if r.random() < plan.repeats:
                world.at(world.now + r.random(), self._transmit, payload, world.now)

    def _transmit(self, payload: bytes | None, since: float) -> None:
        if not self.open:
            return
        world, far = self.owner.world, self.far
        there, back = self.links()
        there = there and far.owner.machine.powered
        if there and not far.open:
            if back:
                world.at(world.now + world.latency(), self.ended, True)  # a reset
                return
        elif there:
            if payload is not None:
                world.at(world.now + world.latency(), far.arrives, payload)
                payload = None
            if back:
                return
        if world.now > since + self.owner.patience_s:
            self.ended(False)
        else:
            world.at(world.now + _AGAIN_S, self._transmit, payload, since)

    def arrives(self, payload: bytes) -> None:
        """A message of the other end is here."""
        if self.open:
            self.owner.guard(lambda: self.owner.receive(self, decode(payload)))

    def ended(self, by_peer: bool) -> None:
        """The kernel says that the connection is over."""
        if self.open:
            self.open = False
            self.owner.world.sometimes["ended by peer" if by_peer else "gave up"] += 1
            self.owner.guard(lambda: self.owner.peers.ended(self))

    def close(self) -> None:
        """Closes this end, as the kernel does for a process that has ended."""
        if self.open:
            self.open = False
            self._finish(self.owner.world.now)

    def _finish(self, since: float) -> None:
        world = self.owner.world
        if self.links()[0]:
            world.at(world.now + world.latency(), self.far.ended, True)
        elif world.now < since + self.owner.patience_s and self.owner.machine.powered:
            world.at(world.now + _AGAIN_S, self._finish, since)


class _Dial:
    def __init__(self) -> None:
        self.end: End | None = None
        self.connecting = False
        self.waiting: list[tuple[str | None, Message]] = []
        self.not_before = 0.0
        self.failure = ""


class SimulatedPeers:
    """`PeerConnections` of a simulated launcher."""

    def __init__(self, owner: SimulatedLauncher) -> None:
        self._owner = owner
        self._dials: dict[Address, _Dial] = {}
        self._ends: list[End] = []

    def send(self, host: str, address: Address | None, message: Message) -> None:
        """See `PeerConnections.send`."""
        for end in reversed(self._ends):
            if end.host.id == host:
                end.send(message)
                return
        if address is not None:
            self._send_to(address, host, message)

    def send_to(self, address: Address, message: Message) -> None:
        """See `PeerConnections.send_to`."""
        self._send_to(address, None, message)

    def _send_to(self, address: Address, host: str | None, message: Message) -> None:
        dial = self._dials.setdefault(address, _Dial())
        world = self._owner.world
        if dial.end is not None:
            if host in (None, dial.end.host.id):
                dial.end.send(message)
        elif dial.connecting or world.now >= dial.not_before:
            dial.waiting.append((host, message))
            if not dial.connecting:
                dial.connecting = True
                limit = world.now + self._owner.patience_s
                world.at(world.now + world.latency(), self._syn, address, dial, limit)

    def failure(self, address: Address) -> str:
        """See `PeerConnections.failure`."""
        dial = self._dials.get(address)
        return "" if dial is None else dial.failure

    def differs(self, address: Address | None) -> bool:
        """See `PeerConnections.differs`: all simulated launchers are of one job."""
        return False

    def close(self) -> None:
        """The process has ended, or the service has."""
        for end in self._ends:
            end.close()
        self._ends.clear()

    def ended(self, end: End) -> None:
        """The kernel says that a connection is over."""
        if end not in self._ends:
            return  # the answer to its handshake has not come
        self._ends.remove(end)
        for dial in self._dials.values():
            if dial.end is end:
                self._failed(dial, "the connection was closed")

    def _syn(self, address: Address, dial: _Dial, limit: float) -> None:
        world, me = self._owner.world, self._owner
        if me.dead:
            return
        machine = world.at_address(address)
        pair = (me.machine.name, machine.name)
        if not machine.powered or pair in world.cut or pair[::-1] in world.cut:
            if world.now > limit:
                self._failed(dial, "it does not answer")
            else:
                world.at(world.now + _AGAIN_S, self._syn, address, dial, limit)
            return
        other = machine.launcher
        if other is None or other.me.port != address[1]:
            self._failed(dial, "connection refused")
            return
        mine, theirs = End(me, other.me), End(other, me.me)
        mine.far, theirs.far = theirs, mine
        other.peers._ends.append(theirs)
        world.at(world.now + world.latency(), self._answered, dial, mine, limit)

    def _answered(self, dial: _Dial, end: End, limit: float) -> None:
        world = self._owner.world
        if self._owner.dead:
            end.close()
        elif not end.open:
            self._failed(dial, "the connection was closed")
        elif end.links()[1] and end.far.owner.machine.powered:
            dial.connecting = False
            dial.end, dial.failure = end, ""
            self._ends.append(end)
            waiting, dial.waiting = dial.waiting, []
            for host, message in waiting:
                if host in (None, end.host.id):
                    end.send(message)
        elif world.now > limit:
            world.sometimes["a handshake was given up"] += 1
            end.close()
            self._failed(dial, "it does not say what it is")
        else:
            world.at(world.now + _AGAIN_S, self._answered, dial, end, limit)

    def _failed(self, dial: _Dial, failure: str) -> None:
        dial.end, dial.connecting, dial.failure = None, False, failure
        dial.waiting.clear()
        dial.not_before = self._owner.world.now + 0.1
