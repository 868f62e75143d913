"""Runs one round: its job, disturbed as the plan says, and the checks of its result."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import tempfile
import time
import uuid
from pathlib import Path

from outlast.campaign.environment import job_environment
from outlast.campaign.plan import Action, LauncherFault, RoundPlan
from outlast.campaign.results import Fired, Problems, RoundResult
from outlast.campaign.rounds.checks import (
    damaged_checkpoints,
    reap_orphans,
    temporary_files,
    unfinished_checkpoints,
)
from outlast.campaign.rounds.figures import (
    DAMAGING,
    Stage,
    believed_partial,
    fired_faults,
    job_times,
    read_stages,
)
from outlast.campaign.rounds.job_on_hosts import JobOnHosts, multi_host_options
from outlast.campaign.rounds.launcher import Follower, LauncherProcess
from outlast.campaign.rounds.programs import AnyProgram, Progress
from outlast.chaos import Kind, Plan
from outlast.errors import EventLogError

STOPPED = 143
_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """How rounds are run.

    Attributes:
        program: the training.
        linger_s: how long after the end of a launcher its job's other processes may end.
        launcher: the command `outlast run`.
        standby: how many standby processes each job has.
        stall_s: a job in which no rank completes a step for this long is ended, and has failed.
    """

    program: AnyProgram
    standby: int
    stall_s: float
    linger_s: float
    launcher: tuple[str, ...]


def run_round(
    plan: RoundPlan,
    folder: Path,
    reference: object | None,
    surroundings: Surroundings,
    follower: Follower = lambda step: None,
) -> RoundResult:
    """Runs a round in `folder`, which must not exist yet.

    Args:
        reference: the result to compare with; `None` for the run that makes it.
        follower: hears of the progress.
    """
    since = time.monotonic()
    round_ = _Round(plan, folder, surroundings, follower)
    try:
        wrong = round_.run()
        if reference is not None:
            wrong += surroundings.program.differences(reference, round_.folder, plan)
        try:
            stages = read_stages(folder / "events")
        except EventLogError as error:
            wrong.append(f"its events cannot be read: {error}")
            stages = []
        return round_.result(wrong, stages, since)
    finally:
        shutil.rmtree(round_.temporary, ignore_errors=True)


class _Round:
    def __init__(
        self, plan: RoundPlan, folder: Path, surroundings: Surroundings, follower: Follower
    ) -> None:
        folder.mkdir(parents=True)
        self._plan = plan
        self.folder = folder.absolute()
        self._surroundings = surroundings
        self._follower = follower
        self._fired = self.folder / "fired"
        self._fired.mkdir(mode=0o700)
        # Not in `folder`: the path of a Unix socket is limited to 107 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="outlast-round-"))
        self._exit_codes: list[int] = []
        self._taken: list[LauncherFault] = []
        self._orphans: list[str] = []

    def run(self) -> list[str]:
        """Runs launchers until the training has ended; returns why it did not, if so."""
        (self.folder / "plan.json").write_text(self._plan.to_json())
        faults = self._plan.faults
        if faults:
            (self.folder / "chaos.json").write_text(Plan(faults=faults).to_json())
        progress = self._surroundings.program.progress(self.folder)
        if self._plan.hosts:
            return self._run_on_hosts(progress)
        # A rank that gets SIGTERM ends the job like a launcher that gets it.
        most = 1 + len(self._plan.launcher) + sum(f.kind is Kind.SIGTERM for f in faults)
        for number in range(most):
            wrong, ended = self._run_launcher(number, progress)
            if wrong or ended:
                return wrong
        return [f"the job was stopped {most} times, more often than planned"]

    def _run_launcher(self, number: int, progress: Progress) -> tuple[list[str], bool]:
        mark = uuid.uuid4().hex
        log = self.folder / f"launcher-{number}.log"
        environment = job_environment(mark, self.temporary, self._fired)
        directory = self._surroundings.program.working_directory(self.folder)
        launcher = LauncherProcess(self._command(), environment, mark, log, directory)
        left = self._plan.launcher[len(self._taken) :]
        try:
            code, taken = launcher.follow(
                progress, left, self._surroundings.stall_s, self._follower
            )
        finally:
            launcher.end()
            found = reap_orphans(mark, self._surroundings.linger_s)
        self._exit_codes.append(code)
        self._taken += taken
        if launcher.stalled:
            stall = f"no rank completed a step for {self._surroundings.stall_s:.0f} s"
            return [f"{stall}, after step {progress.last}; see {log.name}"], True
        self._orphans += [f"launcher {number}: {one}" for one in found]
        if code == 0:
            return [], True
        killed = bool(taken) and taken[0].action is Action.KILL_LAUNCHER
        if code == STOPPED or (killed and code == -signal.SIGKILL):
            return [], False
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return [f"launcher {number} ended with exit code {code}:\n{tail}"], True

    def _run_on_hosts(self, progress: Progress) -> list[str]:
        plan, surroundings = self._plan, self._surroundings
        job = JobOnHosts(
            plan=plan,
            command=self._command(*multi_host_options(plan)),
            fired=self._fired,
            temporary=self.temporary,
            logs=self.folder,
        )
        with job:
            wrong = job.follow(progress, surroundings.stall_s, self._follower)
            self._orphans = [] if wrong else job.orphans(surroundings.linger_s)
        self._exit_codes += job.exit_codes
        self._taken += job.taken
        return wrong

    def _command(self, *options: str) -> list[str]:
        plan = self._plan
        here = (f"--nproc-per-node={plan.ranks}", f"--standby={self._surroundings.standby}")
        return [
            *self._surroundings.launcher,
            *(options or here),
            "--max-restarts=100000",
            "--backoff=0",
            f"--events-dir={self.folder / 'events'}",
            *([f"--chaos={self.folder / 'chaos.json'}"] if plan.faults else []),
            *self._surroundings.program.command(plan, self.folder),
        ]

    def result(self, wrong: list[str], stages: list[Stage], since: float) -> RoundResult:
        """The result, with everything that is wrong."""
        inside = fired_faults(self._plan, self._fired, stages)
        outside = [Fired(kind=one.action.value, step=one.step) for one in self._taken]
        program = self._surroundings.program
        leftovers = temporary_files(self.temporary, program.temporary)
        believed = believed_partial(stages)
        for checkpoints in program.checkpoints(self.folder):
            leftovers += unfinished_checkpoints(checkpoints)
            if not any(one.kind in DAMAGING for one in inside):
                believed += damaged_checkpoints(checkpoints)
        wall, productive = job_times(stages)
        return RoundResult(
            plan=self._plan,
            fired=(*inside, *outside),
            problems=Problems(
                differences=tuple(wrong),
                orphans=tuple(self._orphans),
                leaks=tuple(program.leaks(self.folder)),
                leftovers=tuple(leftovers),
                believed=tuple(believed),
            ),
            exit_codes=tuple(self._exit_codes),
            wall_seconds=wall,
            productive_seconds=productive,
            seconds=time.monotonic() - since,
        )
