"""Runs one round: its job, disturbed as the plan says, and the checks of its result, and of what it
must not leave behind: temporary files, unfinished or damaged checkpoints, open descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast.async_checkpoint import inspection
from outlast.campaign import figures
from outlast.campaign.job import Job, host_options
from outlast.campaign.notes import ENTRY, STEP, read_notes
from outlast.campaign.plan import MOVES, Action, LauncherFault, RoundPlan
from outlast.campaign.programs import Program, Reference
from outlast.campaign.results import Fired, RoundResult
from outlast.chaos import Kind, Plan
from outlast.errors import CheckpointError, EventLogError
from outlast.events.event import Note

LAUNCHER = (sys.executable, "-m", "outlast.launch", "run")
TRAINING = Path(__file__).with_name("training.py")
STOPPED = 143
_GROWTH = 8
"""A process may have this many more descriptors than before, besides the largest increase, which is
that of its first save. A leak repeats at each restart.
"""
_WARM = 2
"""Entries of a process before its resources are compared: some are opened once."""


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
            if all(isinstance(f, LauncherFault) and f.action in MOVES for f in plan.all_faults):
                wrong += steps_made_again(folder)
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
            good = [] if plan.hosts else [STOPPED]
            if killed:
                good.append(-signal.SIGKILL)
            if failed := job.failures(good):
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
            problems["leaks"] += leaks(folder)
        problems["leftovers"] += temporary_files(temporary, program.temporary)
        problems["believed"] += figures.believed_partial(stages)
        for checkpoints in program.checkpoints(folder):
            problems["leftovers"] += unfinished_checkpoints(checkpoints)
            if not any(one.kind in figures.DAMAGING for one in inside):
                problems["believed"] += damaged_checkpoints(checkpoints)
        result.wall_seconds, result.productive_seconds = figures.job_times(stages)


def steps_made_again(folder: Path) -> list[str]:
    """Steps of the own training that a rank has made twice."""
    made = Counter((n.data["step"], n.rank) for n in read_notes(folder) if n.name == STEP)
    again = sorted(f"{step} (rank {rank})" for (step, rank), count in made.items() if count > 1)
    return [f"steps were made again: {', '.join(again[:5])}"] if again else []


def temporary_files(folder: Path, prefix: str) -> list[str]:
    """Files and sockets in the folders of temporary files of the hosts, in entries whose names
    begin with the prefix; empty folders do not count.
    """
    return [
        f"temporary file {path.relative_to(folder)}"
        for entry in sorted(folder.glob(f"*/{prefix}*"))
        for path in (entry, *sorted(entry.rglob("*")))
        if not path.is_dir() or path.is_symlink()
    ]


def unfinished_checkpoints(folder: Path) -> list[str]:
    """Working folders of saves that were neither committed nor removed."""
    with contextlib.closing(inspection.open_storage(str(folder))) as storage:
        found = [one for one in inspection.survey(storage) if one.step is None]
    return [f"{one.folder}: {one.wrong}" for one in found]


def damaged_checkpoints(folder: Path) -> list[str]:
    """Committed checkpoints of which some byte is not the one that was saved."""
    found = []
    with contextlib.closing(inspection.open_storage(str(folder))) as storage:
        for one in inspection.survey(storage):
            if one.step is None:
                continue
            try:
                inspection.verify(storage, one.step)
            except CheckpointError as error:
                found.append(f"{one.folder}: {error}")
    return found


def leaks(folder: Path) -> list[str]:
    """Processes whose descriptors or threads grew with each restart in place."""
    entries: dict[int, list[Note]] = defaultdict(list)
    for note in read_notes(folder):
        if note.name == ENTRY:
            entries[note.pid].append(note)
    found = []
    for pid, notes in entries.items():
        if len(notes) < 2 * _WARM:
            continue
        warm = [note.data for note in notes[_WARM:]]
        where = f"rank {notes[-1].rank} (process {pid})"
        if _grows([sum(data["descriptors"].values()) for data in warm]):
            first, last = warm[0]["descriptors"], warm[-1]["descriptors"]
            more = ", ".join(
                f"{kind}: {first.get(kind, 0)} to {count}"
                for kind, count in sorted(last.items())
                if count > first.get(kind, 0)
            )
            found.append(f"{where} has more descriptors with each restart ({more})")
        if _grows([data["threads"] for data in warm]):
            threads = f"{warm[0]['threads']} to {warm[-1]['threads']}"
            found.append(f"{where} has more threads with each restart ({threads})")
    return found


def _grows(counts: Sequence[int]) -> bool:
    largest = max((b - a for a, b in itertools.pairwise(counts)), default=0)
    return counts[-1] - counts[0] - largest > _GROWTH and counts[-1] == max(counts)
