"""Runs one round: its job, disturbed as the plan says, and the checks of its result."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from outlast.campaign import checks, figures
from outlast.campaign.generate import Card, parse_kinds
from outlast.campaign.job import Job, host_options
from outlast.campaign.plan import Action, RoundPlan
from outlast.campaign.programs import Program, Reference
from outlast.campaign.results import Fired, RoundResult
from outlast.chaos import Kind, Plan
from outlast.errors import EventLogError

LAUNCHER = (sys.executable, "-m", "outlast.launch", "run")
TRAINING = Path(__file__).with_name("training.py")
STOPPED = 143


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a campaign.

    Attributes:
        out: the folder of the results; failed rounds stay in it, others are removed.
        faults: how many faults to fire; `None` without limit.
        seconds: start no further round that would end later than this; `None` without limit.
        seed: of the plans and of the training.
        ranks: of each job.
        kinds: all by default.
        per_round: the number of faults in a round.
        jobs: how many rounds run at the same time.
        standby: how many standby processes each job has.
        keep: whether to keep the folders of all rounds.
        shrink: whether to shorten the plans of failed rounds.
        command: the user's script and its arguments, instead of the campaign's own training.
        stall_s: a job in which no rank completes a step for this long has failed.
        linger_s: how long after the end of a launcher its job's other processes may end.
    """

    out: Path
    faults: int | None = 1000
    seconds: float | None = None
    seed: int = 0
    ranks: int = 4
    kinds: tuple[Card, ...] = field(default_factory=parse_kinds)
    per_round: int = 40
    jobs: int = 1
    standby: int = 2
    keep: bool = False
    shrink: bool = True
    command: tuple[str, ...] = ()
    stall_s: float = 150.0
    linger_s: float = 15.0


def run_round(
    plan: RoundPlan,
    folder: Path,
    program: Program,
    options: Options,
    reference: Reference | None,
    tell: Callable[[int], None],
) -> RoundResult:
    """Runs a round in `folder`, which must not exist yet.

    Args:
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
            result, folder, temporary, program, options, tell
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
    options: Options,
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
                *host_options(plan, options.standby if plan.all_faults else 0),
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
            linger_s=options.linger_s,
        )
        with job:
            stalled = job.follow(progress, options.stall_s, tell)
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
