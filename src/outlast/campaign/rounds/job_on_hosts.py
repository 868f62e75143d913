"""A job on several hosts, of which one after another is cut off from the network."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from outlast.campaign.environment import job_environment
from outlast.campaign.plan import Action, LauncherFault, RoundPlan
from outlast.campaign.rounds.checks import reap_orphans
from outlast.campaign.rounds.launcher import Follower, print_stacks
from outlast.campaign.rounds.network import Network
from outlast.campaign.rounds.programs import Progress

_LOOK_S = 0.05
_TAIL_LINES = 15
_LEASE_S = 5.0
_CUT_OFF_S = 8.0
"""How long a host is cut off: the others declare it lost 1.2 leases after they last heard of it."""
_PORT = 29400


def multi_host_options(plan: RoundPlan) -> list[str]:
    """The options of `outlast run` on each host."""
    endpoints = ",".join(f"h{number}:{_PORT}" for number in range(1, min(plan.hosts, 3) + 1))
    return [
        f"--nnodes={plan.hosts}",
        f"--nproc-per-node={plan.ranks // plan.hosts}",
        "--standby=0",
        "--rdzv-id=campaign",
        f"--rdzv-endpoint={endpoints}",
        f"--host-timeout={_LEASE_S}",
    ]


class JobOnHosts:
    """A network with a launcher on each host; ends all of it when left.

    Attributes:
        taken: the actions on hosts that were carried out.
        exit_codes: of the launchers, by host; of those that were not lost with their host.
    """

    def __init__(
        self, *, plan: RoundPlan, command: Sequence[str], fired: Path, temporary: Path, logs: Path
    ) -> None:
        self._plan = plan
        self._command = command
        self._fired = fired
        self._temporary = temporary
        self._logs = logs
        self._mark = uuid.uuid4().hex
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._cut: tuple[str, Action, float] | None = None  # the host, and until when
        self._settled_at = 0  # the records that tell that training has continued since
        self.taken: list[LauncherFault] = []

    def __enter__(self) -> JobOnHosts:
        self._network = Network(self._plan.hosts, self._logs)
        try:
            for name in self._network.names:
                self._start(name)
        except BaseException:
            self._network.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._network.close()
        for launcher in self._launchers.values():
            launcher.wait()

    @property
    def exit_codes(self) -> list[int]:
        return [launcher.wait() for launcher in self._launchers.values()]

    def follow(self, progress: Progress, stall_s: float, follower: Follower) -> list[str]:
        """Follows the job to its end, and cuts hosts off; returns what went wrong."""
        since = time.monotonic()
        while any(launcher.poll() is None for launcher in self._launchers.values()):
            time.sleep(_LOOK_S)
            if progress.update():
                since = time.monotonic()
            follower(progress.last)
            self._act(progress)
            if time.monotonic() - since > stall_s:
                print_stacks(self._mark, [one.pid for one in self._launchers.values()])
                stall = f"no rank completed a step for {stall_s:.0f} s"
                return [f"{stall}, after step {progress.last}; see launcher-h1.log and the others"]
        progress.update()
        return [
            f"launcher {name} ended with exit code {launcher.returncode}:\n{self._tail(name)}"
            for name, launcher in self._launchers.items()
            if launcher.returncode
        ]

    def orphans(self, linger_s: float) -> list[str]:
        """Describes the processes that outlive the launchers by this time."""
        return reap_orphans(self._mark, linger_s)

    def _act(self, progress: Progress) -> None:
        """Cuts a host off when that is due, or ends what was begun."""
        if self._cut is not None:
            name, action, until = self._cut
            if time.monotonic() >= until:
                self._cut = None
                self._end_cut(name, action)
                # The job waits for the host, so all of its ranks have been replaced by then.
                self._settled_at = progress.records + 2 * self._plan.ranks
            return
        left = self._plan.launcher[len(self.taken) :]
        if left and progress.last >= left[0].step and progress.records >= self._settled_at:
            name = self._network.names[len(self.taken) % self._plan.hosts]
            self._network.cut_off(name)
            self._cut = name, left[0].action, time.monotonic() + _CUT_OFF_S
            self.taken.append(left[0])

    def _end_cut(self, name: str, action: Action) -> None:
        if action is Action.HOST_LOST:
            self._network.power_off(name)
            self._launchers.pop(name).wait()
            shutil.rmtree(self._temporary / name)  # a fresh host has none of these files
        self._network.connect(name)
        if action is Action.HOST_LOST:
            self._network.boot(name)
            self._start(name)

    def _start(self, name: str) -> None:
        temporary = self._temporary / name
        temporary.mkdir()
        environment = job_environment(self._mark, temporary, self._fired)
        with self._log(name).open("ab") as log:
            self._launchers[name] = self._network.start(name, self._command, environment, log)

    def _log(self, name: str) -> Path:
        return self._logs / f"launcher-{name}.log"

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:])
