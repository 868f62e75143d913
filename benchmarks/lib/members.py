"""A member without a process: the real state machine on a store connection that is counted."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.minimal_host import MinimalHost

from outlast.clock import Clock, MonotonicClock
from outlast.coordination.decision import ViewRecord
from outlast.coordination.ops import Link, perform_on, run
from outlast.coordination.stores.store import Store
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.events.emitter import Place
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.recovery.host_protocol import (
    GrowPolicy,
    Interrupted,
    Raised,
    RecoveryState,
    Returned,
)
from outlast.inprocess.recovery.state_machine import Machine
from outlast.inprocess.timeouts import Timeouts

__all__ = ["CountedStore", "Member", "connected"]

PATIENCE_S = 300.0


def connected(port: int, *, host_server: bool = False) -> TcpClient:
    """A connection to a store on this machine, as a rank has it."""
    client = TcpClient("127.0.0.1", port, PATIENCE_S)
    client.host_server = host_server
    client.connect()
    return client


class CountedStore:
    """A store connection that counts the operations and the received bytes."""

    def __init__(self, store: Store) -> None:
        self.operations: Counter[str] = Counter()
        self.received_bytes = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.operations[name] += 1
            value = operation(*args)
            if isinstance(value, bytes):
                self.received_bytes += len(value)
            return value

        return counted

    def total(self) -> tuple[int, int]:
        """The operations and bytes so far."""
        return self.operations.total(), self.received_bytes


class Member(MinimalHost):
    """One member and its host: member `k` fails in iteration k, until `restarts`.

    Attributes:
        entered: when it entered the function, by iteration.
        failed: when it failed, by iteration.
    """

    def __init__(self, rank: int, size: int, restarts: int, all_in: Callable[[int], None]) -> None:
        self.clock: Clock = MonotonicClock()
        self.token, self.place = f"token {rank}", Place()
        self.preferred_rank = rank
        self.grow = GrowPolicy.AT_ONCE
        self.durations = dataclasses.replace(
            Timeouts().in_seconds(), barrier=PATIENCE_S, completion=PATIENCE_S, backstop=60.0
        )
        self.size, self.restarts = size, restarts
        self.entered: dict[int, float] = {}
        self.failed: dict[int, float] = {}
        self._all_in = all_in
        self._counted: CountedStore | None = None
        self._first: tuple[int, int] = (0, 0)
        self._last: tuple[int, int] = (0, 0)

    def counted(self, store: CountedStore) -> None:
        """Sets the connection whose operations are counted."""
        self._counted = store

    def between(self) -> tuple[int, int]:
        """The operations and bytes between the first and the last entry into the function."""
        return self._last[0] - self._first[0], self._last[1] - self._first[1]

    def run(self, store: Store) -> Any:
        """Runs the member from the first barrier to the last."""
        self.link = Link("job/", perform_on(store))
        return run(Machine(self, self.link, self.size).run())

    # -- the rank-local side -----------------------------------------------------------------

    def at(self, state: RecoveryState) -> None:
        self.member = self.place.member

    async def assign(self, link: Link, record: ViewRecord) -> None:
        alive = [m for m in record.slots() if m is not None]
        self.place.rank, self.place.world_size = alive.index(self.place.member), len(alive)

    def serve(self) -> str | None:
        return "127.0.0.1:1" if self.preferred_rank == 0 else None

    async def initialize(self, store: str) -> FaultRecord | None:
        return None

    async def call(self) -> Returned | Raised | Interrupted:
        iteration = self.place.iteration
        self.entered[iteration] = time.monotonic()
        if self._counted is not None:
            if iteration == 0:
                self._first = self._counted.total()
            self._last = self._counted.total()
        if iteration >= self.restarts:
            return Returned(None)
        if self.preferred_rank == iteration % self.size:
            self._all_in(iteration)  # returns once the others wait, as in a collective
            self.failed[iteration] = time.monotonic()
            return Raised(self.fault("planned"))
        await self.link.wait_for(f"over/{iteration}", PATIENCE_S)
        return Interrupted()
