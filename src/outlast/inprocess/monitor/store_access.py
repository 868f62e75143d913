"""The monitor process's access to the store; it continues without the store if that is lost."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outlast.clock import Clock
from outlast.coordination.barrier import lost_members
from outlast.coordination.decisions.view import ViewRecord
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.errors import RankTimeout, StoreError
from outlast.inprocess.distributed.connection import Connection, connect
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.logfile import write_line

T = TypeVar("T")


class StoreAccess:
    """A connection that is dropped on the first error. The main process detects a lost store by
    itself; the monitor then continues to watch the main process, without the store.
    """

    def __init__(self, plan: MonitorPlan, clock: Clock) -> None:
        self._plan, self._clock = plan, clock
        self.link = Link(plan.prefix)
        self.membership = MembershipProtocol(self.link, plan.world_size, plan.rules)
        self._connection: Connection | None = None

    @property
    def available(self) -> bool:
        return self._connection is not None

    def connect(self, give_up: Callable[[], bool]) -> None:
        """Tries to connect for at most `plan.patience`, or until `give_up` returns true."""
        plan = self._plan
        deadline = self._clock.now() + plan.patience
        while self._connection is None and self._clock.now() < deadline:
            try:
                self._connection = connect(
                    plan.factory, plan.kwargs, plan.endpoint, 1.0, plan.ready
                )
            except (StoreError, RankTimeout) as e:
                write_line(e)
                if give_up():
                    return

    def perform(self, coroutine: Coroutine[Op, Any, T]) -> T | None:
        """Runs the store operations of `coroutine`; `None` if the store is lost."""
        if self._connection is None:
            coroutine.close()
            return None
        try:
            return drive(coroutine, perform_on(self._connection))
        except StoreError as e:
            write_line(e)
            self._connection = None
            return None

    def view(self, iteration: int) -> ViewRecord | None:
        return self.perform(self.membership.view(iteration))

    def lost_members(self) -> frozenset[int] | None:
        return self.perform(lost_members(self.link))
