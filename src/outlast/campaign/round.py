"""Runs one round: its job, disturbed as the plan says, and the checks of its result."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from outlast.campaign import checks, figures
from outlast.campaign.job import Job, host_options
from outlast.campaign.plan import Action, RoundPlan
from outlast.campaign.programs import Program, Reference
from outlast.campaign.results import Fired, RoundResult
from outlast.chaos import Kind, Plan
from outlast.errors import EventLogError

LAUNCHER = (sys.executable, "-m", "outlast.launch", "run")
TRAINING = Path(__file__).with_name("training.py")
STOPPED = 143


class Round:
    """A round in a folder, which must not exist yet."""

    def __init__(self, plan: RoundPlan, folder: Path, program: Program, standby: int) -> None:
        self._plan = plan
        self._folder = folder.absolute()
        self._program = program
        self._standby = standby if plan.all_faults else 0
        self._result = RoundResult(plan=plan)

    def run(self, reference: Reference | None, tell: Callable[[int], None]) -> RoundResult:
        """Runs it.

        Args:
            reference: the result to compare with; `None` for the run that makes it.
            tell: called with the highest completed step, several times a second.
        """
        since, plan, folder, result = time.monotonic(), self._plan, self._folder, self._result
        folder.mkdir(parents=True)
        (folder / "fired").mkdir(mode=0o700)
        (folder / "plan.json").write_text(plan.to_json())
        if plan.faults:
            (folder / "chaos.json").write_text(Plan(faults=plan.faults).to_json())
        # Not in `folder`: the path of a Unix socket is limited to 107 bytes.
        temporary = Path(tempfile.mkdtemp(prefix="outlast-round-"))
        try:
            wrong = self._run_jobs(temporary, tell)
            if reference is not None:
                wrong += self._program.differences(reference, folder, plan)
            result.problems["differences"] += wrong
            self._check(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        result.seconds = time.monotonic() - since
        return result

    def _run_jobs(self, temporary: Path, tell: Callable[[int], None]) -> list[str]:
        """Runs launchers until the training has ended; returns why it did not, if so."""
        plan, result = self._plan, self._result
        progress = self._program.progress(self._folder)
        # A rank that gets SIGTERM ends the job like a launcher that gets it.
        stops = 0 if plan.hosts else len(plan.launcher)
        most = 1 + stops + sum(fault.kind is Kind.SIGTERM for fault in plan.faults)
        taken = 0
        for number in range(most):
            job = Job(
                plan,
                number=number,
                faults=plan.launcher[taken:],
                command=self._command(),
                directory=self._program.working_directory(self._folder),
                temporary=temporary,
                folder=self._folder,
            )
            with job:
                stalled = job.follow(progress, self._program.stall_s, tell)
            result.exit_codes += job.exit_codes
            result.fired += [Fired(kind=one.action.value, step=one.step) for one in job.taken]
            taken += len(job.taken)
            if stalled:
                return [stalled]
            result.problems["orphans"] += [f"launcher {number}: {one}" for one in job.orphans]
            killed = any(one.action is Action.KILL_LAUNCHER for one in job.taken)
            stopped = [] if plan.hosts else [STOPPED] + [-signal.SIGKILL] * killed
            if failed := job.failures(stopped):
                return failed
            if not any(job.exit_codes):
                return []
        return [f"the job was stopped {most} times, more often than planned"]

    def _command(self) -> list[str]:
        plan, folder = self._plan, self._folder
        return [
            *LAUNCHER,
            *host_options(plan, self._standby),
            "--max-restarts=100000",
            "--backoff=0",
            f"--events-dir={folder / 'events'}",
            *([f"--chaos={folder / 'chaos.json'}"] if plan.faults else []),
            *self._program.command(plan, folder),
        ]

    def _check(self, temporary: Path) -> None:
        result, plan, folder, program = self._result, self._plan, self._folder, self._program
        problems, stages = result.problems, []
        try:
            stages = figures.read_stages(folder / "events")
        except EventLogError as error:
            problems["differences"].append(f"its events cannot be read: {error}")
        inside = figures.fired_faults(plan, folder / "fired", stages)
        if not plan.launcher:  # those are on hosts or of jobs, and have no records
            result.unexplained = figures.unexplained(folder / "fired", stages)
        result.fired = [*inside, *result.fired]
        # Processes on different hosts have the same IDs, so they cannot be told apart.
        if program.own and not plan.hosts:
            problems["leaks"] += checks.leaks(folder)
        problems["leftovers"] += checks.temporary_files(temporary, program.temporary)
        problems["believed"] += figures.believed_partial(stages)
        for checkpoints in program.checkpoints(folder):
            problems["leftovers"] += checks.unfinished_checkpoints(checkpoints)
            if not any(one.kind in figures.DAMAGING for one in inside):
                problems["believed"] += checks.damaged_checkpoints(checkpoints)
        result.wall_seconds, result.productive_seconds = figures.job_times(stages)
