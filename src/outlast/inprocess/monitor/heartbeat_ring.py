"""Heartbeats: each monitor process increments its own, and watches the next member's."""

from __future__ import annotations

from outlast.clock import Clock
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.fault_reports import FaultReports
from outlast.inprocess.monitor.store_access import StoreAccess


class HeartbeatRing:
    """The members of a view form a ring in the order of their IDs, without the lost ones.

    A member is judged by this process's clock alone: by the last observed change of its count.
    """

    def __init__(
        self, plan: MonitorPlan, clock: Clock, store: StoreAccess, reports: FaultReports
    ) -> None:
        self._plan, self._page, self._clock = plan, plan.page, clock
        self._store, self._reports = store, reports
        self.next_beat = 0.0  # when the next heartbeat is due
        self.watched: int | None = None  # the next in the ring; `None` if there is no other member
        self._chosen_in = -2  # the iteration in which `watched` was chosen
        self._count, self._changed_at = -1, 0.0

    def beat(self) -> None:
        """Increments this process's heartbeat and looks at the next member's, if that is due."""
        now = self._clock.now()
        if now < self.next_beat:
            return
        self.next_beat = now + self._plan.interval
        if self._page.member < 0 or not self._store.available:
            return
        if self._store.count(f"beat/{self._page.member}", 1) is not None:
            self._watch_next()

    def _watch_next(self) -> None:
        iteration = self._page.iteration
        if iteration != self._chosen_in:
            self._choose_next(iteration, frozenset())
        if self.watched is None:
            return
        count = self._store.count(f"beat/{self.watched}", 0)
        if count is None:
            return
        now = self._clock.now()
        if count != self._count:
            self._count, self._changed_at = count, now
        elif now - self._changed_at >= self._plan.heartbeat:
            lost = self._store.lost_members() or frozenset()
            if self.watched not in lost:
                self._reports.unresponsive(self.watched)
            self._choose_next(iteration, lost | {self.watched})

    def _choose_next(self, iteration: int, lost: frozenset[int]) -> None:
        view = self._store.view(iteration)
        self.watched, self._chosen_in = None, iteration
        self._count, self._changed_at = -1, self._clock.now()
        if view is None:
            return
        own = self._page.member
        others = sorted(m for m in view.expected if m != own and m not in lost)
        if others:
            self.watched = next((m for m in others if m > own), others[0])
