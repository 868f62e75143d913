"""The job of a round: `outlast run` on this machine, or on each of several hosts; followed by the
steps of its ranks, disturbed, and ended with all of its processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from outlast.campaign.environment import job_environment, marked, reap_orphans
from outlast.campaign.network import Network
from outlast.campaign.notes import Progress
from outlast.campaign.plan import MOVES, Action, LauncherFault, RoundPlan

LINGER_S = 15.0
"""How long after the end of the launchers other processes may end."""
_LOOK_S = 0.05
_DUMP_S = 5.0
_TAIL_LINES = 15
_LEASE_S = 5.0
_CUT_OFF_S = 8.0
"""How long a host is cut off: the others declare it lost 1.2 leases after they last heard of it."""
_PORT = 29400
_SPARE = "this one is a spare"
_DRAIN = (sys.executable, "-m", "outlast.launch", "drain")


def host_options(plan: RoundPlan, standby: int) -> list[str]:
    """The options of `outlast run` that say how many hosts and processes there are."""
    if not plan.hosts:
        return [f"--nproc-per-node={plan.ranks}", f"--standby={standby}"]
    endpoints = ",".join(f"h{number}:{_PORT}" for number in range(1, min(plan.hosts, 3) + 1))
    return [
        f"--nnodes={plan.hosts}",
        f"--nproc-per-node={plan.ranks // plan.hosts}",
        "--standby=0",
        "--rdzv-id=campaign",
        f"--rdzv-endpoint={endpoints}",
        f"--host-timeout={_LEASE_S}",
    ]


class Job:
    """The launchers of a job, which run until this is left.

    Args:
        number: of the launchers of this round on this machine.
        faults: what is left to do to the launcher or to hosts.
        command: `outlast run`, its options, its script, and the script's arguments.
        folder: of the round, with the record of fired faults, and the output of the launchers.

    Attributes:
        taken: the actions that were carried out. On this machine at most one, which ends the job.
        exit_codes: of the launchers that have ended and were not lost with their host.
        orphans: after the end, the processes that outlived the launchers.
    """

    def __init__(
        self,
        plan: RoundPlan,
        *,
        number: int,
        faults: Sequence[LauncherFault],
        command: Sequence[str],
        directory: Path | None,
        temporary: Path,
        folder: Path,
    ) -> None:
        self._plan, self._number = plan, number
        self._faults = list(faults)
        self._command, self._directory, self._temporary = command, directory, temporary
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._network: Network | None = None
        self._begun: tuple[LauncherFault, Iterator[None]] | None = None
        self._settled_at = 0  # the events that tell that training has continued since
        self.taken: list[LauncherFault] = []
        self.orphans: list[str] = []

    def __enter__(self) -> Job:
        if not self._plan.hosts:
            self._start(str(self._number))
            return self
        self._network = Network(self._plan.hosts + self._plan.moves, self._folder)
        try:
            for name in self._network.names[: self._plan.hosts]:
                self._start(name)
        except BaseException:
            self._network.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None or self._network is None:
                for launcher in self._launchers.values():
                    launcher.kill()
                self.orphans = reap_orphans(self._mark, LINGER_S)
        finally:
            if self._network is not None:
                self._network.close()
            for launcher in self._launchers.values():
                launcher.wait()

    @property
    def exit_codes(self) -> list[int]:
        codes = [launcher.poll() for launcher in self._launchers.values()]
        return [code for code in codes if code is not None]

    def follow(self, progress: Progress, stall_s: float, tell: Callable[[int], None]) -> str:
        """Follows the job to its end, and carries out the actions that are due. Returns how the job
        stalled; an empty string if it ended.

        Args:
            stall_s: the job is given up when no rank completes a step for this long.
            tell: called several times a second with the highest step that a rank has completed;
                an error that it raises ends the job.
        """
        since = time.monotonic()
        while any(launcher.poll() is None for launcher in self._launchers.values()):
            time.sleep(_LOOK_S)
            if progress.update():
                since = time.monotonic()
            tell(progress.last)
            self._act(progress)
            if time.monotonic() - since > stall_s:
                self._print_stacks()
                logs = ", ".join(self._log(name).name for name in self._launchers)
                stall = f"no rank completed a step for {stall_s:.0f} s"
                return f"{stall}, after step {progress.last}; see {logs}"
        progress.update()
        if self._begun is not None and self._begun[0].action in MOVES:
            self.taken.remove(self._begun[0])
        return ""

    def failures(self, also_good: Sequence[int]) -> list[str]:
        """The launchers that ended with another exit code than 0 and these, with their output."""
        failed = []
        for name, launcher in self._launchers.items():
            code = launcher.poll()
            if code not in (None, 0, *also_good):
                log = self._log(name).read_text(errors="replace").splitlines()
                tail = "\n".join(log[-_TAIL_LINES:])
                failed.append(f"launcher {name} ended with exit code {code}:\n{tail}")
        return failed

    def _act(self, progress: Progress) -> None:
        """Carries out the next action when it is due, or ends what was begun."""
        if self._begun is not None:
            fault, rest = self._begun
            if next(rest, self) is self:
                self._begun = None
                if fault.action in MOVES and progress.last == self._plan.steps:
                    self.taken.remove(fault)  # the end of the training was first
                # The job waits for the host, so all of its ranks have been replaced by then.
                self._settled_at = progress.events + 2 * self._plan.ranks
            return
        due = self._faults and progress.last >= self._faults[0].step
        if not due or progress.events < self._settled_at:
            return
        if self._network is None and self.taken:
            return  # the launcher is ending
        fault = self._faults.pop(0)
        if self._network is None:
            stop = fault.action is Action.STOP
            self._launchers[str(self._number)].send_signal(
                signal.SIGTERM if stop else signal.SIGKILL
            )
        else:
            name = sorted(self._launchers)[len(self.taken) % self._plan.hosts]
            act = self._move if fault.action in MOVES else self._cut_off
            self._begun = fault, act(self._network, name, fault.action)
        self.taken.append(fault)

    def _cut_off(self, network: Network, name: str, action: Action) -> Iterator[None]:
        network.cut_off(name)
        until = time.monotonic() + _CUT_OFF_S
        while time.monotonic() < until:
            yield
        if action is Action.HOST_LOST:
            network.power_off(name)
            self._launchers.pop(name).wait()
            shutil.rmtree(self._temporary / name)  # a fresh host has none of these files
        network.connect(name)
        if action is Action.HOST_LOST:
            network.boot(name)
            self._start(name)

    def _move(self, network: Network, name: str, action: Action) -> Iterator[None]:
        launcher, rank = self._launchers[name], action is Action.RANK_MOVES
        free = next((other for other in network.names if other not in self._launchers), "")
        moved = self._told(" has moved from pid ")
        if action is Action.HOST_LEAVES:
            waits = self._told(_SPARE)
            self._start(free)
            while self._told(_SPARE) == waits:
                yield
            for process in psutil.Process(launcher.pid).children():  # of `nsenter`
                process.send_signal(signal.SIGTERM)
        else:
            drain = [*_DRAIN, *(["--rank=0"] if rank else [name]), *self._where]
            with self._log("drain").open("ab") as log:
                asked = network.start(name, drain, os.environ, log)
            while asked.poll() is None:
                yield
            if not rank:
                self._start(free)
        while self._told(" has moved from pid ") == moved if rank else launcher.poll() is None:
            yield
        if launcher.poll() == 0:
            del self._launchers[name]

    def _told(self, words: str) -> int:
        """How many lines of the launchers have these words."""
        logs = self._folder.glob("launcher-*.log")
        return sum(log.read_text(errors="replace").count(words) for log in logs)

    @property
    def _where(self) -> list[str]:
        return [each for each in self._command if each.startswith("--rdzv-")]

    def _start(self, name: str) -> None:
        # The launchers of one host find what the one before has left.
        temporary = self._temporary / (name if self._network else "host")
        temporary.mkdir(exist_ok=True)
        environment = job_environment(self._mark, temporary, self._folder / "fired")
        with self._log(name).open("ab") as log:
            if self._network is not None:
                launcher = self._network.start(name, self._command, environment, log)
            else:
                launcher = subprocess.Popen(
                    self._command,
                    env=environment,
                    cwd=self._directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        self._launchers[name] = launcher

    def _log(self, name: str) -> Path:
        return self._folder / f"launcher-{name}.log"

    def _print_stacks(self) -> None:
        """Makes all processes print their stacks, which ends them, except for the launchers: they
        pass the output on.
        """
        launchers = {launcher.pid for launcher in self._launchers.values()}
        for process in marked(self._mark):
            if process.pid not in launchers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    os.kill(process.pid, signal.SIGABRT)  # the fault handler prints all stacks
        time.sleep(_DUMP_S)
