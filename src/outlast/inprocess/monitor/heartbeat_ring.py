"""Heartbeats: each monitor process increments its own, and watches the next member's.

In a job on many hosts, the ring is that of the members on one host, and its keys are the host's
own: the launchers' leases tell of the loss of a host, so the load of the store does not grow with
the number of ranks.
"""

from __future__ import annotations

from outlast.clock import Clock
from outlast.coordination.decision import Decision, ViewRecord, decode_record, encode_record
from outlast.coordination.stores.store import HOST_KEYS
from outlast.inprocess.monitor.reports import FaultReports, MonitorPlan, StoreAccess


class HeartbeatRing:
    """A ring of the view's members (with `plan.host_ring`, of this host) by ID, without lost ones.
    A member is judged by this process's clock alone: by the last observed change of its count.
    """

    def __init__(
        self, plan: MonitorPlan, clock: Clock, store: StoreAccess, reports: FaultReports
    ) -> None:
        self._plan, self._page, self._clock = plan, plan.page, clock
        self._store, self._reports = store, reports
        self._prefix = HOST_KEYS + plan.prefix if plan.host_ring else plan.prefix
        self._announced = -1  # the member that this host knows of
        self._here: frozenset[int] = frozenset()  # the members on this host
        self.next_beat = 0.0  # when the next heartbeat is due
        self.watched: int | None = None  # the next in the ring; `None` if there is no other member
        self._chosen_in = -2  # the iteration in which `watched` was chosen
        self._count, self._changed_at = -1, 0.0

    def beat(self) -> None:
        now = self._clock.now()
        if now < self.next_beat:
            return
        self.next_beat = now + self._plan.durations.monitor_interval
        if self._page.member < 0 or not self._store.available:
            return
        if self._count_up(self._page.member, 1) is not None:
            self._watch_next(now)

    def continued(self) -> None:
        """This process could not run for a while; the next member's may not have run either."""
        self._changed_at = self._clock.now()

    def _count_up(self, member: int, amount: int) -> int | None:
        return self._store.perform(self._store.link.at(self._prefix).add(f"beat/{member}", amount))

    def _look_around(self) -> bool:
        """Whether members on this host have been added since the last look."""
        if not self._plan.host_ring:
            return False
        if self._announced != self._page.member:
            self._announced = self._page.member
            self._store.perform(
                self._store.link.at(self._prefix).append("members", b"%d\n" % self._announced)
            )
        here = self._store.perform(self._store.link.at(self._prefix).read("members")) or b""
        before, self._here = self._here, frozenset(map(int, here.split()))
        return self._here != before

    def _watch_next(self, began: float) -> None:
        iteration = self._page.iteration
        if self._look_around() or iteration != self._chosen_in:
            self._choose_next(iteration, frozenset())
        if self.watched is None:
            return
        count = self._count_up(self.watched, 0)
        if count is None:
            return
        now = self._clock.now()
        # If the store was slow (it may just have lost its leader), so were the others' heartbeats.
        slow = now - began > self._plan.durations.monitor_interval
        if count != self._count or slow:
            self._count, self._changed_at = count, now
        elif now - self._changed_at >= self._plan.durations.heartbeat:
            lost = self._store.lost_members() or frozenset()
            if self.watched not in lost:
                self._reports.unresponsive(self.watched)
            self._choose_next(iteration, lost | {self.watched})

    def _view(self, iteration: int) -> ViewRecord | None:
        """The view of an iteration. Of the ring of one host, the first member reads it for all."""
        link = self._store.link.at(self._prefix)
        if self._plan.host_ring and (held := self._store.perform(link.read("view"))) is not None:
            known = decode_record(held)
            if isinstance(known, Decision) and known.view.iteration == iteration:
                return known.view
        view = self._store.view(iteration)
        if self._plan.host_ring and view is not None:
            self._store.perform(link.put("view", encode_record(Decision(view))))
        return view

    def _choose_next(self, iteration: int, lost: frozenset[int]) -> None:
        view = self._view(iteration)
        self.watched, self._chosen_in = None, iteration
        self._count, self._changed_at = -1, self._clock.now()
        if view is None:
            return
        own = self._page.member
        members = view.expected & self._here if self._plan.host_ring else view.expected
        others = sorted(m for m in members if m != own and m not in lost)
        if others:
            self.watched = next((m for m in others if m > own), others[0])
