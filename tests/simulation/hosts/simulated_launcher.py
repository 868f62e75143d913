"""One launcher of a simulated run: the real `HostService` without its thread and its sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.event_loop import Timer
from outlast.launch.hosts.replicated.endpoints import Place
from outlast.launch.hosts.replicated.messages import Message
from outlast.launch.hosts.replicated.past import Past
from outlast.launch.hosts.replicated.record import RETRY_S, Record
from outlast.launch.hosts.replicated.service import PATIENCE_SHARE, HostService
from simulation.hosts.simulated_network import End, SimulatedPeers

if TYPE_CHECKING:
    from simulation.hosts.founding import FoundingSimulation, Machine

RUN = "run"


class PowerLost(BaseException):
    """The host has lost its power in the middle of something; no code of the product goes on."""


class _Record(Record):
    """A record whose host may lose its power before or after the file is replaced, and whose disk
    may be slow, or full for a while.
    """

    def __init__(self, owner: SimulatedLauncher) -> None:
        super().__init__(Path(owner.machine.disk), RUN)
        self._owner = owner
        self._idle_at = 0.0
        self._begins = False

    def begin(self, me: str) -> None:
        """See `Record.begin`. A disk that is full from the start leaves nothing to be checked."""
        self._begins = True
        super().begin(me)
        self._begins = False

    def set_later(self, past: Past, written: Callable[[], None]) -> None:
        self.past = past
        world = self._owner.world

        def write() -> None:
            try:
                self._write()
            except OSError:
                world.at(world.now + RETRY_S, self._owner.guard, write)
            else:
                written()

        self._idle_at = max(self._idle_at, world.now) + world.disk_s(self._owner.machine)
        world.at(self._idle_at, self._owner.guard, write)

    def _write_at_last(self) -> bool:
        with contextlib.suppress(OSError):
            self._write()
        return True

    def _later(self, work: Callable[[], object]) -> None:
        work()

    def _replace(self) -> None:
        if self._owner.world.power_fails():
            raise PowerLost
        if not self._begins and self._owner.world.disk_is_full(self._owner.machine):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._replace()
        if self._owner.world.power_fails():
            raise PowerLost


class _Loop:
    """`EventLoop` of one launcher, on the clock of its host."""

    def __init__(self, owner: SimulatedLauncher) -> None:
        self._owner = owner
        self.clock = SimpleNamespace(now=self._now)

    def _now(self) -> float:
        return self._owner.machine.clock(self._owner.world.now)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """See `EventLoop`."""
        timer, owner = Timer(callback), self._owner
        # A little later, because a rounded time may be a little early, and nothing due yet.
        when = owner.world.now + seconds / owner.machine.rate + 1e-6
        owner.world.at(when, lambda: owner.guard(timer.fire) if timer.pending else None)
        return timer

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """See `EventLoop`; this one is only called in a round."""
        callback()


class _Page:
    """The `LeasePage`."""

    def __init__(self, owner: SimulatedLauncher) -> None:
        self._owner = owner
        self.deadline = 0.0

    def valid(self) -> bool:
        """Whether this host holds a lease now."""
        return self._owner.machine.clock(self._owner.world.now) < self.deadline

    def renew(self, deadline: float) -> None:
        """Sets the deadline; at its end, the service gives the time of the real clock."""
        self.deadline = 0.0 if self._owner._over else deadline
        if self.valid():
            self._owner.world.saw_lease(self._owner)

    def renew_reads(self, covered: int, deadline: float) -> None:
        """Nothing: no simulated worker reads by it."""


class SimulatedLauncher(HostService):
    """Runs on a machine until it is killed, or its service is over.

    Attributes:
        dead: whether nothing of it acts any more.
    """

    def __init__(self, world: FoundingSimulation, machine: Machine, number: int) -> None:
        self.world = world
        self.machine = machine
        self.dead = False
        self.patience_s = PATIENCE_SHARE * world.timing.lease / machine.rate
        port = 29400 if machine.own >= 0 else 40000 + number
        record = _Record(self)
        none: Any = None
        page: Any = _Page(self)
        super().__init__(
            RUN,
            HostInfo(f"l{number}", machine.name),
            world.endpoints,
            Place(none, machine.address, port, machine.own),
            world.timing,
            page,
            lambda: None,
            record,
            None,
        )
        self._random = random.Random(world.random.random())
        self._hello(0)
        self.peers = SimulatedPeers(self)

    def launch(self) -> None:
        """What the thread does first."""
        loop: Any = _Loop(self)
        peers: Any = self.peers

        def begin() -> None:
            self._record.begin(self.me.id)
            self._begin(loop, peers)

        self.guard(begin)

    @property
    def group(self) -> str:
        """The group that this host is in."""
        return "" if self._membership is None else self._membership.group

    @property
    def lease_end(self) -> float:
        """Until when it may act, by the true clock."""
        return float("-inf") if self.dead else self.machine.true(self._page.deadline)

    def guard(self, work: Callable[[], None]) -> None:
        """One round of the loop."""
        if self.dead:
            return
        was = self._membership
        try:
            try:
                work()
                if self._membership is not None and not self._over:
                    self._membership.pump()
            except OSError as e:
                self._end(str(e))  # as `_fail`, which logs it
        except PowerLost:
            self.world.sometimes["power lost at a write"] += 1
            self.machine.power_off()
            return
        if was is None and self._membership is not None:
            self.world.entered(self)
        if self._over and not self.dead:
            self.stop()
            self.world.over(self)

    def stop(self) -> None:
        """Ends as the kernel ends a process."""
        self.dead = True
        self._record.close()
        self.peers.close()
        if self.machine.launcher is self:
            self.machine.launcher = None

    def receive(self, end: End, message: Message) -> None:
        """A message has arrived."""
        peer: Any = end
        self._on_message(peer, message)
