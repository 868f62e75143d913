"""The launcher's descendants: reaps its children, and ends processes that the workers started, so
that no process is left behind.

SIGCHLD reports the end of children, not one descriptor per child: a subreaper gets children that it
did not start, and must reap those too.

- *A worker's children in its process group* get SIGTERM when the worker fails, and SIGKILL a
  moment later. Not at once: multiprocessing's resource tracker is one of them, and in that moment
  it unlinks the shared memory of the dead worker.
- *Helpers in separate sessions* (monitor processes, a user's daemons) become children of the
  launcher when their parent dies, because the launcher is a child subreaper. At the end of the
  job, or of an attempt, they get a moment to end by themselves, then SIGTERM, then SIGKILL. Those
  that hold snapshots of the training state are left alone between two attempts: the next one
  restores from them. They are passive then, and end by themselves when it has taken them over.
- *If the launcher is killed with SIGKILL*, the kernel kills the workers (`exec_shim`), and the
  orphan killer (`orphan_killer`) the rest. *If both are killed at once*, the workers still die.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

LINGER_S = 1.0
"""How long helpers of ended workers may take to end by themselves."""
TERMINATE_S = 5.0
"""How long helpers may take after SIGTERM, unless the grace time is shorter."""
KILL_S = 30.0
"""How long a killed process may take to disappear before the launcher gives up and reports it."""

SNAPSHOT_HOLDERS = (
    "outlast.async_checkpoint.writer.main",
    "outlast.async_checkpoint.peer_copies.keeper",
    "outlast.chaos.storage",
)
"""The modules that processes with snapshots run: `python -m MODULE`."""

_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = {"": (".", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""By the controller in `/proc/self/cgroup`: the folder of the hierarchy, and the file with the
counter. Version 2 names no controller.
"""


def ended_children() -> Iterator[tuple[int, int]]:
    """Pid and exit code (negative for a signal) of every child that has ended but is not reaped.
    The caller must `reap` each before it asks for the next: `waitid` reports them one at a time, so
    no end is lost when one signal reports several.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        yield found.si_pid, code


def reap(pid: int) -> None:
    """Release an ended child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def terminate_group(pid: int) -> None:
    """Send SIGTERM to the process group of an ended child. Call before the child is reaped: until
    then no other process can get its number.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def kill_group(
    pid: int, wanted: Callable[[psutil.Process], bool] = lambda _: True
) -> list[psutil.Process]:
    """Kill those that are wanted of the process group of an ended child; return them. Only
    descendants of this process are killed, in case the number now belongs to an unrelated group.
    """
    killed = []
    for number in psutil.pids():  # a replacement waits for this: few are looked at more closely
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another one's
            if number != pid and os.getpgid(number) == pid:
                process = psutil.Process(number)
                own = os.getpid() in (each.pid for each in process.parents())
                if own and wanted(process):
                    process.kill()
                    killed.append(process)
    return killed


def snapshot_holders() -> list[int]:
    """The descendants that hold snapshots of workers that have ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()[1:3]
            if len(words) == 2 and words[0] == "-m" and words[1] in SNAPSHOT_HOLDERS:
                found.append(process.pid)
    return found


def kill_descendants(keep: Iterable[int]) -> None:
    """Kill every descendant except those to keep, and wait for their end: for a launcher that
    cannot continue. Otherwise, `Shutdown` does this.
    """
    while left := descendants(keep):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=KILL_S)
        if alive:
            return


def descendants(keep: Iterable[int]) -> list[psutil.Process]:
    """Every descendant of this process except those to keep."""
    kept = set(keep)
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in kept]


def with_descendants(pids: Iterable[int]) -> list[int]:
    """These processes of the launcher, and those that they have started."""
    found = []
    for pid in tuple(pids):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return found


class OomKills:
    """Counts the kills in the cgroup of this process, where its children live too: a container, a
    job of a scheduler, a login. Without such a counter there never seem to be any.
    """

    def __init__(self, own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> None:
        self._file = _counter_file(own, root)
        self._seen = self._count()

    def any_new(self) -> bool:
        """Whether there was one that no call before has returned."""
        new = self._count() > self._seen
        self._seen += new
        return new

    def _count(self) -> int:
        if self._file is None:
            return 0
        try:
            fields = [line.split() for line in self._file.read_text().splitlines()]
        except OSError:  # the cgroup is gone
            return 0
        return next((int(value) for name, value in fields if name == "oom_kill"), 0)


def _counter_file(own: Path, root: Path) -> Path | None:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controller, group = line.split(":", 2)
        if controller in _PLACES:
            hierarchy, name = _PLACES[controller]
            # In a container, the path may be that on the host: then the container's is the root.
            for folder in (group.strip("/"), "."):
                if (file := root / hierarchy / folder / name).is_file():
                    return file
    return None
