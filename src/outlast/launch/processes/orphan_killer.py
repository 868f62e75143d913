"""Kills the processes that a killed launcher leaves behind; run as a program, by path.

    python -I -S orphan_killer.py LAUNCHER_PID MARK FOLDER

A launcher killed with SIGKILL cleans up nothing. Its workers die with it (see `exec_shim`), but
their helpers do not: helpers in separate sessions have no tie to any process that died. This
small process sleeps until the launcher is gone. Then it kills every process that carries MARK in
its environment, until there is none, removes FOLDER (the launcher's temporary files; may be
empty), and exits. When a job ends normally, the launcher kills this process last.

A process that dropped its environment (`env -i`) is not found. If this process dies, the launcher
starts another.

Nothing of outlast is imported here: the process must stay small.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys

NET_S = 60.0
"""How long a killed process may take to end before the next search for marked processes."""
ROUNDS = 10
"""The maximum number of searches: a process that cannot be killed must not keep this one alive."""


def main(arguments: list[str]) -> None:
    """Wait until the launcher has ended, then clean up after it."""
    launcher, mark, folder = int(arguments[0]), arguments[1], arguments[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    await_end(launcher)
    for _ in range(ROUNDS):
        killed = kill_marked(mark)
        if not killed:
            break
        await_all(killed)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def await_end(launcher: int) -> None:
    """Wait until the process `launcher`, this one's parent, has ended."""
    try:
        pidfd = os.pidfd_open(launcher)
    except ProcessLookupError:
        return
    # Checked after opening: only now is it certain that the descriptor is the parent's, and not
    # that of an unrelated process that got its number after it died.
    if os.getppid() == launcher:
        await_all([pidfd], net_s=None)
    else:
        os.close(pidfd)


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


def await_all(pidfds: list[int], net_s: float | None = NET_S) -> None:
    """Wait until the processes have ended; closes the descriptors."""
    for pidfd in pidfds:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        waiter.poll(None if net_s is None else net_s * 1000)
        os.close(pidfd)


if __name__ == "__main__":
    main(sys.argv[1:])
