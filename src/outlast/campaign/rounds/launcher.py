"""`outlast run` as a process: started, followed by the steps of its ranks, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from outlast.campaign.plan import Action, LauncherFault
from outlast.campaign.rounds.checks import marked
from outlast.campaign.rounds.programs import Progress
from outlast.system.waiting import readable

_LOOK_S = 0.05
_DUMP_S = 5.0


class Follower(Protocol):
    """Hears of every look at a running job; an error that it raises ends the job."""

    def __call__(self, step: int) -> None:
        """`step` is the highest that a rank has completed."""
        ...


class LauncherProcess:
    """A launcher, and the output of its job.

    Args:
        command: `outlast run`, its options, its script, and the script's arguments.
        environment: of the launcher.
        mark: the value of the mark in `environment`.
        log: the file of its output.
        directory: where it is started; `None`: here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        mark: str,
        log: Path,
        directory: Path | None = None,
    ) -> None:
        self._mark = mark
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stalled = False
        """Whether it was killed because no rank made progress."""

    def follow(
        self,
        progress: Progress,
        actions: Sequence[LauncherFault],
        stall_s: float,
        follower: Follower,
    ) -> tuple[int, list[LauncherFault]]:
        """Follows the job to its end; returns the launcher's exit code, and the actions taken: at
        most one, since each ends the launcher.
        """
        taken: list[LauncherFault] = []
        pidfd = os.pidfd_open(self._process.pid)
        try:
            since = time.monotonic()
            while not readable(pidfd, timeout=_LOOK_S):
                if progress.update():
                    since = time.monotonic()
                follower(progress.last)
                if not taken and actions and progress.last >= actions[0].step:
                    taken.append(actions[0])
                    self._act(actions[0].action)
                if time.monotonic() - since > stall_s:
                    self._end_stalled()
        finally:
            os.close(pidfd)
            code = self.end()
        progress.update()
        return code, taken

    def end(self) -> int:
        """Kills the launcher if it still runs; returns its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def _act(self, action: Action) -> None:
        number = signal.SIGTERM if action is Action.STOP else signal.SIGKILL
        self._process.send_signal(number)

    def _end_stalled(self) -> None:
        """Makes every process print its stacks, and ends the job."""
        self.stalled = True
        print_stacks(self._mark, {self._process.pid})
        self._process.kill()


def print_stacks(mark: str, launchers: Collection[int]) -> None:
    """Makes all processes of a job print their stacks, which ends them, except for its launchers:
    they pass the output on.
    """
    for process in marked(mark):
        if process.pid not in launchers:
            _signal(process.pid, signal.SIGCONT)
            _signal(process.pid, signal.SIGABRT)  # the fault handler prints all stacks
    time.sleep(_DUMP_S)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
