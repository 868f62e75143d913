"""Workers that SIGKILL does not end: they wait in the kernel, for a device that does not answer.

Such a process ends when that wait is over, perhaps never. It runs no code of its own any more, so
its rank is dead; but it has its devices, and the next process may wait there, too. So no process
gets them: on many hosts this host leaves the job, and on one the rank is not replaced. The end of a
process with much memory takes long as well, but uses a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outlast.launch.agent.resources import JobResources
from outlast.launch.workers.worker_group import Worker
from outlast.system.processes import is_dying, status_fields

STUCK_S = 10.0
"""After which a process that has been killed, and has used no CPU since, is stuck."""
_LOOK_S = 1.0


class StuckWorkers:
    """Calls `found` with each such worker, and with what it waits for; from `look` on."""

    def __init__(self, resources: JobResources, found: Callable[[Worker, str], None]) -> None:
        self._resources, self._found = resources, found
        # How often each was dying with this CPU time: of no use is the time that has passed, as all
        # processes of the machine may have been stopped.
        self._looks: dict[tuple[int, str, str], int] = {}
        self.pids: list[int] = []

    def look(self) -> None:
        before, self._looks = self._looks, {}
        for worker in [each for each in self._resources.workers if is_dying(each.pid)]:
            fields = status_fields(worker.pid)  # it is not reaped yet
            seen = worker.pid, fields[11], fields[12]
            self._looks[seen] = before.get(seen, -1) + 1
            if self._looks[seen] * _LOOK_S >= STUCK_S:
                self.pids.append(worker.pid)
                self._found(worker, f"{fields[0]}{_place(worker.pid)}")
        self._resources.loop.call_later(_LOOK_S, self.look)


def _place(pid: int) -> str:
    """Where in the kernel it waits, if this user may know."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return f" in {place}" if place not in ("", "0") else ""
