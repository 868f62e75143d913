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


def run_round(
    plan: RoundPlan,
    folder: Path,
    program: Program,
    standby: int,
    reference: Reference | None,
    tell: Callable[[int], None],
) -> RoundResult:
    """Runs a round in `folder`, which must not exist yet.

    Args:
        standby: how many standby processes its job has.
        reference: the result to compare with; `None` for the run that makes it.
        tell: called with the highest completed step, several times a second.
    """
    since = time.monotonic()
    folder.mkdir(parents=True)
    folder = folder.absolute()
    (folder / "fired").mkdir(mode=0o700)
    (folder / "plan.json").write_text(plan.to_json())
    if plan.faults:
        (folder / "chaos.json").write_text(Plan(faults=plan.faults).to_json())
    # Not in `folder`: the path of a Unix socket is limited to 107 bytes.
    temporary = Path(tempfile.mkdtemp(prefix="outlast-round-"))
    result = RoundResult(plan=plan)
    try:
        result.problems["differences"] += _run_jobs(
            result, folder, temporary, program, standby, tell
        )
        if reference is not None:
            result.problems["differences"] += program.differences(reference, folder, plan)
        _check(result, folder, temporary, program)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    result.seconds = time.monotonic() - since
    return result


def _run_jobs(
    result: RoundResult,
    folder: Path,
    temporary: Path,
    program: Program,
    standby: int,
    tell: Callable[[int], None],
) -> list[str]:
    """Runs launchers until the training has ended; returns why it did not, if so."""
    plan = result.plan
    progress = program.progress(folder)
    # A rank that gets SIGTERM ends the job like a launcher that gets it.
    stops = 0 if plan.hosts else len(plan.launcher)
    most = 1 + stops + sum(fault.kind is Kind.SIGTERM for fault in plan.faults)
    taken = 0
    for number in range(most):
        job = Job(
            plan,
            number=number,
            faults=plan.launcher[taken:],
            command=[
                *LAUNCHER,
                *host_options(plan, standby if plan.all_faults else 0),
                "--max-restarts=100000",
                "--backoff=0",
                f"--events-dir={folder / 'events'}",
                *([f"--chaos={folder / 'chaos.json'}"] if plan.faults else []),
                *program.command(plan, folder),
            ],
            directory=program.working_directory(folder),
            fired=folder / "fired",
            temporary=temporary,
            logs=folder,
        )
        with job:
            stalled = job.follow(progress, program.stall_s, tell)
        result.exit_codes += job.exit_codes
        result.fired += [Fired(kind=one.action.value, step=one.step) for one in job.taken]
        taken += len(job.taken)
        if stalled:
            return [stalled]
        result.problems["orphans"] += [f"launcher {number}: {one}" for one in job.orphans]
        killed = any(one.action is Action.KILL_LAUNCHER for one in job.taken)
        stopped = () if plan.hosts else (STOPPED, *([-signal.SIGKILL] if killed else []))
        if failed := job.failures(stopped):
            return failed
        if not any(job.exit_codes):
            return []
    return [f"the job was stopped {most} times, more often than planned"]


def _check(result: RoundResult, folder: Path, temporary: Path, program: Program) -> None:
    problems, plan = result.problems, result.plan
    stages = []
    try:
        stages = figures.read_stages(folder / "events")
    except EventLogError as error:
        problems["differences"].append(f"its events cannot be read: {error}")
    inside = figures.fired_faults(plan, folder / "fired", stages)
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
