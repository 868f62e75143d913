"""Kills what a killed launcher leaves behind, and the workers of a host whose lease is over; run as
a program, by path.

    python -I -S orphan_killer.py LAUNCHER_PID MARK FOLDER [LEASE_PAGE]

A launcher killed with SIGKILL cleans up nothing. Its workers die with it (see `exec_shim`), but
their helpers do not: helpers in separate sessions have no tie to any process that died. This
small process sleeps until the launcher is gone. Then it kills every process that carries MARK in
its environment, until there is none, removes FOLDER (the launcher's temporary files; may be
empty), and exits. When a job ends normally, the launcher kills this process last.

On many hosts, the launcher renews the deadline in LEASE_PAGE (see `outlast.system.lease_page`). If
the deadline passes, because this host is cut off or because the launcher is stopped or hangs, the
other hosts may replace the workers: this process kills them first. It works while the launcher is
stopped, and goes on after the launcher has a new lease.

A process that dropped its environment (`env -i`) is not found. If this process dies, the launcher
starts another.

Nothing of outlast is imported here: the process must stay small.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import signal
import sys
import time

NET_S = 60.0
"""How long a killed process may take to end before the next search for marked processes."""
ROUNDS = 10
"""The maximum number of searches: a process that cannot be killed must not keep this one alive."""

AGAIN_S = 0.2
"""Between two searches while the lease is over: a stopped launcher may have been about to start a
worker. They end when the launcher gets a new lease, or ends.
"""


class Lease:
    """The launcher's deadline, read from its lease page."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            page = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._deadline = memoryview(page).cast("d")

    def left_s(self) -> float | None:
        """Seconds until the deadline, which the launcher may move meanwhile; `None` while there has
        been no lease. The clock also advances while the machine is suspended.
        """
        deadline = self._deadline[0]
        return deadline - time.clock_gettime(time.CLOCK_BOOTTIME) if deadline else None


def main(arguments: list[str]) -> None:
    """Wait until the launcher has ended, then clean up after it."""
    launcher, mark, folder = int(arguments[0]), arguments[1], arguments[2]
    lease = Lease(arguments[3]) if len(arguments) > 3 else None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    await_end(launcher, mark, lease)
    for _ in range(ROUNDS):
        killed = kill_marked(mark)
        if not killed:
            break
        await_all(killed)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def await_end(launcher: int, mark: str, lease: Lease | None) -> None:
    """Wait until the process `launcher`, this one's parent, has ended; meanwhile, kill the marked
    processes whenever the lease is over.
    """
    try:
        pidfd = os.pidfd_open(launcher)
    except ProcessLookupError:
        return
    # Checked after opening: only now is it certain that the descriptor is the parent's, and not
    # that of an unrelated process that got its number after it died.
    if os.getppid() == launcher:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        while not waiter.poll(None if lease is None else 1000 * keep_lease(lease, mark)):
            pass
    os.close(pidfd)


def keep_lease(lease: Lease, mark: str) -> float:
    """Kill the marked processes if the lease is over; return the seconds until the next look."""
    left_s = lease.left_s()
    if left_s is None:
        return AGAIN_S
    if left_s > 0:
        return left_s
    for pidfd in kill_marked(mark):
        os.close(pidfd)
    return AGAIN_S


def kill_marked(mark: str) -> list[int]:
    """Kill every process with `mark` in its environment; returns a descriptor of each."""
    killed = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        # The descriptor first: while it is open, it cannot refer to another process.
        try:
            pidfd = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                marked = mark.encode() in file.read().split(b"\0")
            if marked:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            marked = False  # it ended, or is another user's
        if marked:
            killed.append(pidfd)
        else:
            os.close(pidfd)
    return killed


def await_all(pidfds: list[int]) -> None:
    """Wait until the processes have ended; closes the descriptors."""
    for pidfd in pidfds:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        waiter.poll(NET_S * 1000)
        os.close(pidfd)


if __name__ == "__main__":
    main(sys.argv[1:])
