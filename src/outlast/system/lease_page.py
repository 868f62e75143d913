"""The lease of a host, as all processes of the host see it: a deadline in a small shared file.

On many hosts, a host may act only while it holds a lease. The agent renews the deadline; others
read it: the orphan killer, which kills the workers when the deadline passes even if the agent is
stopped, and workers, before they commit a checkpoint.

The file holds the deadline, a double in the machine's byte order: it is aligned and has one writer,
so a reader sees the old value or the new one. The orphan killer, without outlast, relies on it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

_SIZE = 8


def now() -> float:
    """The clock of the deadline: monotonic, and it advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeasePage:
    """A lease page. The deadline is 0 until the first lease is held."""

    def __init__(self, path: Path, descriptor: int, access: int) -> None:
        self.path = path
        try:
            self._map = mmap.mmap(descriptor, _SIZE, access=access)
        finally:
            os.close(descriptor)
        self._deadline = memoryview(self._map).cast("d")

    @classmethod
    def create(cls, folder: Path) -> LeasePage:
        """A new page in `folder`, which only this user can read and write."""
        descriptor, path = tempfile.mkstemp(prefix="lease-", dir=folder)
        os.ftruncate(descriptor, _SIZE)
        return cls(Path(path), descriptor, mmap.ACCESS_WRITE)

    @classmethod
    def open(cls, path: Path) -> LeasePage:
        """The page of another process, to read it. A `ValueError` says that the file is no page."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), mmap.ACCESS_READ)

    @property
    def deadline(self) -> float:
        """Until when this host may act, on the clock of `now`."""
        return float(self._deadline[0])

    def valid(self) -> bool:
        return now() < self.deadline

    def renew(self, deadline: float) -> None:
        """Sets the deadline; only the agent calls this."""
        self._deadline[0] = deadline

    def close(self) -> None:
        self._deadline.release()
        self._map.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
