"""Whether the workers of a `DataLoader` live, while the main thread waits for a batch of theirs.

That wait runs Python code every five seconds, to see whether a worker has died, so it would count
as progress for ever: also while a worker waits for a lock that nobody will release, the most usual
hang of a loader. So it is progress only if each of its workers has done something: an idle one asks
for work every five seconds too. A worker that loads for long in one call into C shows nothing, as
the main thread does that loads by itself; its CPU time counts (`CpuTime`).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType
from typing import Any

_WAIT = ("dataloader.py", "_try_get_data")  # the name of this method since torch 1.0
_DEPTH = 12  # `select` in `poll` in `get` in the wait: with room for others


class LoaderWorkers:
    """Watches the workers of the loader for which the main thread waits."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def are_quiet(self, frame: FrameType | None) -> bool:
        """Whether the main thread, which is in `frame`, waits for workers of which one has done
        nothing since the last call that returned `False`.
        """
        iterator = _waiting_iterator(frame)
        if iterator is None:
            self._seen = {}
            return False
        # One whose part of an `IterableDataset` is over has ended; torch finds one that was killed.
        counts = {worker.pid: activity(worker.pid) for worker in iterator._workers}
        found = {pid: count for pid, count in counts.items() if count}
        if found.keys() == self._seen.keys() and any(found[k] == self._seen[k] for k in found):
            return True
        self._seen = found
        return False


def _waiting_iterator(frame: FrameType | None) -> Any:
    for _ in range(_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == _WAIT[1] and code.co_filename.endswith(_WAIT[0]):
            iterator = frame.f_locals.get("self")
            return iterator if hasattr(iterator, "_workers") else None
        frame = frame.f_back
    return None


def activity(pid: int) -> int:
    """How often the threads of this process have stopped running: it grows when one has run. 0 if
    the process has ended.
    """
    count = 0
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    for thread in threads:
        try:
            lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
        except OSError:
            continue  # the thread has ended
        if any(line.startswith("State:\tZ") for line in lines):
            continue
        count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count
