"""Claims and fires one fault, once per job."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from outlast.chaos.fired_faults import FiredFaults
from outlast.chaos.kinds import Kind, Phase
from outlast.chaos.other_processes import server_of
from outlast.chaos.plan import Moment, PlannedFault
from outlast.chaos.writer.server import WriterServer
from outlast.clock import Clock
from outlast.system.arguments import seconds

log = logging.getLogger(__name__)


class Firing:
    """Fires faults in this process.

    Args:
        fired: the record of fired faults.
        action: injects a fault.
        store_port: the port of the job's store, if it is known.

    Attributes:
        spent: the keys of faults known to have fired.
        monitor_pid: the monitor process of this rank.
        writers: its writer processes.
    """

    def __init__(
        self,
        fired: FiredFaults,
        action: Callable[..., None],
        clock: Clock,
        store_port: int | None,
    ) -> None:
        self._fired = fired
        self._action = action
        self._clock = clock
        self._store_port = store_port
        self.spent: set[str] = set()
        self.monitor_pid: int | None = None
        self.writers: WriterServer | None = None

    def fire(self, key: str, kind: Kind, moment: Moment, fault: PlannedFault | None = None) -> bool:
        """Claims and fires a fault; false if already claimed. Most faults do not return."""
        if key in self.spent:
            return False
        if kind.needs_writer and (self.writers is None or not self.writers.connected):
            return False  # not yet: a writer process is started with the first save
        lasts = None if fault is None or fault.seconds is None else seconds(fault.seconds)
        store = kind is Kind.STORE_FROZEN and self._store_port is not None
        claimed = acting = False
        try:
            claimed = self._fired.claim(key, self._record(key, kind, moment))
            if not claimed:
                self.spent.add(key)
                return False
            place = f"iteration {moment.iteration}, step {moment.step}"
            if moment.phase is not Phase.STEP:
                place += f", in phase {moment.phase}"
            log.warning("rank %d fires %s at %s (%s)", moment.rank, kind, place, key)
            store_pid = server_of(self._store_port or 0) if store else None
            acting = True
            self.spent.add(key)
            self._action(
                kind,
                monitor_pid=self.monitor_pid,
                message=f"a planned {kind} at {place} ({key} of the plan)",
                seconds=lasts,
                writers=self.writers,
                store_pid=store_pid,
            )
        finally:
            # If a restart interrupts this thread here, the fault has not fired.
            if claimed and not acting:
                self._fired.release(key)
        return True

    def _record(self, key: str, kind: Kind, moment: Moment) -> dict[str, Any]:
        return {
            "key": key,
            "kind": kind.value,
            "rank": moment.rank,
            "iteration": moment.iteration,
            "step": moment.step,
            "phase": moment.phase.value,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": self._clock.now(),
        }
