"""The launcher's children: how they are reaped, and why none is left behind, whatever dies.

- *A worker's own children in its process group* get SIGTERM when the worker fails, and SIGKILL a
  moment later. Not at once: multiprocessing's resource tracker is one of them, and in that moment
  it unlinks the shared memory that the worker left.
- *Helpers in sessions of their own* (monitor processes, a user's daemons) become children of the
  launcher when their parent dies, because the launcher is a child subreaper. At the end of the
  job, or of an attempt, they get a moment to end by themselves, then SIGTERM, then SIGKILL.
- *The launcher killed with SIGKILL*: the kernel kills the workers (`shim`), the warden
  (`warden`) kills the rest. *Launcher and warden killed at once*: the workers still die.

Children are seen to end by SIGCHLD, not by a descriptor for each: a subreaper gets children that
it did not start, and must reap those too. `waitid` tells of ended children one at a time, so a
signal that stands for several of them loses none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from outlast.launch.event_loop import Loop, Timer

__all__ = [
    "LINGER_S",
    "Sweep",
    "end_group",
    "ended_children",
    "kill_all",
    "kill_group",
    "reap",
    "start_warden",
]

LINGER_S = 1.0
"""How long helpers of ended workers may take to end by themselves."""
ASKED_S = 5.0
"""How long they may take after SIGTERM, if the grace time is not shorter."""
KILLED_S = 30.0
"""How long a killed process may take to vanish before the launcher gives it up, and says so."""


def ended_children() -> Iterator[tuple[int, int]]:
    """Pid and exit code (negative for a signal) of every child that has ended, not yet reaped.

    Each must be reaped (`reap`) before the next is asked for.
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
    """Let go of an ended child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def end_group(pid: int) -> None:
    """Ask the process group of an ended child to end: before it is reaped, while no stranger can
    get its number.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def kill_group(pid: int) -> None:
    """Kill what is left of the process group of a child that was reaped: descendants of this
    process only, so that the number cannot mean a stranger's group.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid:
                process.kill()


def kill_all(keep: Iterable[int]) -> None:
    """Kill every descendant of this process but those to keep, and wait for their end.

    For a launcher that cannot go on; in good order, `Sweep` does this.
    """
    kept = set(keep)
    while left := [p for p in psutil.Process().children(recursive=True) if p.pid not in kept]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=KILLED_S)
        if alive:
            return


def start_warden(
    mark: str, folder: Path | None, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process that cleans up if this one is killed; before any worker."""
    program = str(Path(__file__).with_name("orphan_killer.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", program, str(os.getpid()), mark, str(folder or "")],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Sweep:
    """Ends every descendant of this process but those to keep, then calls back.

    Driven by `check`, to be called whenever a child was reaped: the descendants of a descendant
    become children when it ends, so that the last of them is always announced.
    """

    def __init__(
        self,
        loop: Loop,
        keep: Callable[[], Iterable[int]],
        steps: Iterable[tuple[float, signal.Signals | None]],
        done: Callable[[list[int]], None],
    ) -> None:
        self._loop = loop
        self._keep = keep
        self._steps = iter(steps)
        self._done = done
        self._signal: signal.Signals | None = None
        self._timer: Timer | None = None
        self._over = False

    @classmethod
    def patient(cls, grace_s: float) -> list[tuple[float, signal.Signals | None]]:
        """The steps at the end of a job: leave time, ask, kill."""
        return [
            (LINGER_S, None),
            (min(ASKED_S, grace_s), signal.SIGTERM),
            (KILLED_S, signal.SIGKILL),
        ]

    @classmethod
    def brisk(cls) -> list[tuple[float, signal.Signals | None]]:
        """The steps between two attempts of a job: ask, kill."""
        return [(LINGER_S, signal.SIGTERM), (KILLED_S, signal.SIGKILL)]

    @classmethod
    def at_once(cls) -> list[tuple[float, signal.Signals | None]]:
        """The steps where nothing is waited for: kill."""
        return [(KILLED_S, signal.SIGKILL)]

    def start(self) -> None:
        """Begin with the first step; calls back at once if there is no descendant."""
        self._next()

    def hurry(self) -> None:
        """Kill now what is left."""
        self._steps = iter(self.at_once())
        self._next()

    def check(self) -> None:
        """Call back if no descendant is left; send those that came since what others got."""
        if self._over:
            return
        left = self._descendants()
        if not left:
            self._finish([])
        elif self._signal is signal.SIGKILL:
            self._send(left)

    def _next(self) -> None:
        if self._over:
            return
        if self._timer is not None:
            self._timer.cancel()
        left = self._descendants()
        wait_s, self._signal = next(self._steps, (None, None))
        if not left or wait_s is None:
            self._finish([p.pid for p in left])
            return
        self._timer = self._loop.call_later(wait_s, self._next)
        self._send(left)

    def _finish(self, left: list[int]) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._done(left)

    def _send(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            if self._signal is not None:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(self._signal)  # looks first that it is still the same

    def _descendants(self) -> list[psutil.Process]:
        keep = set(self._keep())
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in keep]
