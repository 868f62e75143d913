"""The leases of a host, as all processes of the host see them: a small shared file.

On many hosts, a host may act only while it holds a lease. The agent renews the deadline; others
read it: the orphan killer, which kills the workers when the deadline passes even if the agent is
stopped, and workers, before they commit a checkpoint.

By a read lease, workers know without a request that no restart has begun (`inprocess.read_lease`):
`covered` is what it was when they have asked the store, and the deadline of reads has not passed.

Each field has eight bytes in the machine's order and is aligned, so a reader sees the old value or
the new one: the deadline (the orphan killer, without outlast, relies on its place), the deadline of
reads, and `covered`.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import time
from pathlib import Path

_SIZE = 24
_HOST_PAGE = "outlast-lease"


def now() -> float:
    """The clock of the deadlines: monotonic, and it advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeasePage:
    """A lease page. The deadlines are 0 until the first lease is held."""

    def __init__(self, path: Path, descriptor: int, access: int) -> None:
        self.path = path
        try:
            self._map = mmap.mmap(descriptor, _SIZE, access=access)
        finally:
            os.close(descriptor)
        view = memoryview(self._map)
        self._deadlines, self._covered = view[:16].cast("d"), view[16:].cast("q")

    @classmethod
    def create(cls, folder: Path) -> LeasePage:
        """A new page in `folder`, which only this user can read and write."""
        descriptor, path = tempfile.mkstemp(prefix="lease-", dir=folder)
        os.ftruncate(descriptor, _SIZE)
        return cls(Path(path), descriptor, mmap.ACCESS_WRITE)

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> LeasePage:
        """The page of another process. A `ValueError` says that the file is no page. Only a
        `HostPage` is written to: its path may lead to a file of another process, once its own has
        ended, or on another host.
        """
        if write and not os.readlink(path).startswith(f"/memfd:{_HOST_PAGE} "):
            raise ValueError(f"it is {os.readlink(path)}, not the page of a launcher")
        flags, access = (os.O_RDWR, mmap.ACCESS_WRITE) if write else (os.O_RDONLY, mmap.ACCESS_READ)
        return cls(path, os.open(path, flags | os.O_CLOEXEC), access)

    @property
    def deadline(self) -> float:
        """Until when this host may act, on the clock of `now`."""
        return float(self._deadlines[0])

    def valid(self) -> bool:
        return now() < self.deadline

    def renew(self, deadline: float) -> None:
        """Sets the deadline; only the agent calls this."""
        self._deadlines[0] = deadline

    # ------------------------------------------------------------------ the read lease
    @property
    def covered(self) -> int:
        return int(self._covered[0])

    def renew_reads(self, covered: int, deadline: float) -> None:
        """Renews the read lease, for what is covered now; in this order, see `unchanged`."""
        self._covered[0] = covered
        self._deadlines[1] = deadline

    def recall(self) -> None:
        """Before an abort on one host: ends what other ranks know. Two ranks may do it at once."""
        self._covered[0] = time.monotonic_ns()

    def unchanged(self, covered: int) -> bool:
        """Whether `covered` is what it was, and is vouched for, at a moment since this was called.

        The deadline is read first. If it is that of a renewal with a new `covered`, the new one is
        read, too; if it is older, it has not passed by the moment at which `covered` was read.
        """
        deadline = self._deadlines[1]
        return bool(self._covered[0] == covered and now() < deadline)

    def close(self) -> None:
        self._deadlines.release()
        self._covered.release()
        self._map.close()


class HostPage(LeasePage):
    """The page of a job on one host, where no lease ends. It is in memory, and other processes open
    it through this one: it is gone with the job, whatever ends that.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_HOST_PAGE)
        os.ftruncate(self._descriptor, _SIZE)
        path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        super().__init__(path, os.dup(self._descriptor), mmap.ACCESS_WRITE)
        self.renew(math.inf)
        self.renew_reads(0, math.inf)

    def close(self) -> None:
        super().close()
        os.close(self._descriptor)
