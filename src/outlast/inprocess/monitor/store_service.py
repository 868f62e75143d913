"""The stores that a monitor process serves after its main process has ended or was dismissed."""

from __future__ import annotations

import math
import os
import threading

from outlast.clock import Clock
from outlast.coordination.barrier import done_key
from outlast.coordination.membership import decision_key
from outlast.errors import RankTimeout, StoreError
from outlast.inprocess.distributed.connection import connect
from outlast.inprocess.monitor.config import MonitorPlan
from outlast.inprocess.monitor.heartbeat_ring import HeartbeatRing
from outlast.inprocess.monitor.logfile import write_line
from outlast.inprocess.monitor.store_access import StoreAccess
from outlast.inprocess.store import TCPStore
from outlast.system.waiting import readable

_OBSERVER = 1 << 40
"""The member ID of a monitor whose main process is not a member: after all others in the ring."""


class StoreService:
    """Keeps stores reachable for the other ranks.

    Heartbeats continue in the meantime, so that it does not wait for members whose hosts have died.
    """

    def __init__(
        self, plan: MonitorPlan, clock: Clock, store: StoreAccess, ring: HeartbeatRing
    ) -> None:
        self._plan, self._page, self._clock = plan, plan.page, clock
        self._store, self._ring = store, ring

    def replace_iteration_store(self, dying: int | None) -> None:
        """Takes over the port of the iteration's store, which ended with the main process, until
        all ranks have left the iteration. Ranks that are just connecting to it retry forever, in
        C++, where no interrupt reaches them; so a server must answer there.

        Args:
            dying: pidfd of a main process that may not have ended completely: one of its threads
                has, but the port becomes free only when the process has ended.
        """
        port, deadline = self._page.store_port, self._clock.now() + self._plan.patience
        if not port or not self._store.available:
            return
        if dying is not None:
            readable(dying, timeout=self._plan.patience)
        try:
            server = TCPStore.serve(host_name=self._plan.address, port=port)
        except (StoreError, RuntimeError) as e:
            write_line(e)
            return
        self._stay_until(decision_key(self._page.iteration + 1, 0), deadline)
        del server

    def serve_until_goodbye(self) -> None:
        """Keeps serving the job's store until every member has said goodbye or is lost."""
        if self._store.available:
            self._stay_until(done_key("goodbye"), math.inf)

    def _stay_until(self, key: str, deadline: float) -> None:
        over, writable = os.pipe()
        threading.Thread(target=self._wait_for, args=(key, writable), daemon=True).start()
        while not readable(over, timeout=self._plan.interval) and self._clock.now() < deadline:
            if not self._store.available:
                return
            current = self._store.perform(self._store.membership.current())
            if current is not None:
                self._page.iteration = current
                if self._page.member < 0:
                    self._page.member = _OBSERVER
            self._ring.beat()
            if self._ring.watched is None and self._all_lost():
                return

    def _all_lost(self) -> bool:
        view = self._store.view(self._page.iteration)
        lost = self._store.lost_members()
        return view is not None and lost is not None and view.expected <= lost

    def _wait_for(self, key: str, writable: int) -> None:
        plan = self._plan
        try:
            connection = connect(plan.factory, plan.kwargs, plan.endpoint, plan.patience)
            connection.wait_for(plan.prefix + key, None)
        except (StoreError, RankTimeout) as e:
            write_line(e)
        os.write(writable, b"x")
