"""The campaign: rounds side by side, until enough faults have fired or the time is over."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from outlast.campaign.environment import describe
from outlast.campaign.generate import Card, Shape, parse_kinds, plans, reference_plan
from outlast.campaign.plan import OF_HOSTS, Fault, RoundPlan, hosts_for
from outlast.campaign.results import CampaignResult, Failure, RoundResult
from outlast.campaign.rounds.network import unavailable
from outlast.campaign.rounds.programs import (
    AnyProgram,
    CampaignError,
    OwnTraining,
)
from outlast.campaign.rounds.run_round import Surroundings, run_round
from outlast.campaign.rounds.user_script import UserScript
from outlast.campaign.shrink import shorten
from outlast.campaign.side_by_side import Cancelled, SideBySide

LAUNCHER = (sys.executable, "-m", "outlast.launch", "run")
TRAINING = Path(__file__).with_name("training.py")

_UNDISTURBED = ("the undisturbed run", "its repetition")
_MOST_RUNS = 12
"""Runs that shorten the plan of one failed round."""
_FEW = 6
"""Faults in each round of a campaign of limited time: a round is never cut short."""
_MOST_JOBS = 8
"""Rounds side by side by default, however many cores there are: each needs gigabytes of memory."""


def default_jobs() -> int:
    """The number of cores that this process may use, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_JOBS)


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
        script: the campaign's own training.
        command: the user's script and its arguments, instead of that training.
        stall_s: a job in which no rank completes a step for this long has failed.
        linger_s: how long after the end of a launcher its job's other processes may end.
        launcher: the command `outlast run`.
    """

    out: Path
    faults: int | None = 1000
    seconds: float | None = None
    seed: int = 0
    ranks: int = 4
    kinds: tuple[Card, ...] = parse_kinds([])
    per_round: int = 40
    jobs: int = 1
    standby: int = 2
    keep: bool = False
    shrink: bool = True
    script: Path = field(default_factory=lambda: TRAINING)
    command: tuple[str, ...] = ()
    stall_s: float = 150.0
    linger_s: float = 15.0
    launcher: tuple[str, ...] = field(default_factory=lambda: LAUNCHER)

    @property
    def shape(self) -> Shape:
        """The shape of the rounds."""
        most = self.per_round if self.seconds is None else min(self.per_round, _FEW)
        faults = most if self.faults is None else max(1, min(most, self.faults))
        return Shape(ranks=self.ranks, faults=faults, kinds=self.kinds)


class Observer:
    """Hears how a campaign goes on, always in the thread that runs it; this one does nothing."""

    def running(self, steps: Mapping[str, int]) -> None:
        """These jobs are running, and each has come to this step."""

    def ended(self, result: RoundResult) -> None:
        """A round has ended. One that failed is shortened after that."""

    def left_out(self, what: str, why: str) -> None:
        """These faults are not possible here."""


class Campaign:
    """Runs the rounds of a campaign.

    Raises:
        CampaignError: if an undisturbed run fails, or differs from another one, or none of the
            kinds is possible here.
    """

    def __init__(self, options: Options, observer: Observer | None = None) -> None:
        self._options = options
        self._observer = observer or Observer()
        own = not options.command
        self._program: AnyProgram = (
            OwnTraining(options.script) if own else UserScript(options.command)
        )
        self._surroundings = Surroundings(
            program=self._program,
            standby=options.standby,
            stall_s=options.stall_s,
            linger_s=options.linger_s,
            launcher=options.launcher,
        )
        self._since = time.monotonic()
        self._lock = threading.Lock()
        # Written by the threads of the rounds:
        self._rounds: list[RoundResult] = []
        self._failures: dict[int, Failure] = {}  # by the number of the round
        self._steps: dict[str, int] = {}
        self._ended: deque[RoundResult] = deque()
        self._faults = 0  # of the rounds that have ended, and planned for those that run
        self._longest = 0.0

    def run(self) -> CampaignResult:
        """Runs rounds as the options say."""
        options, shape = self._options, self._possible(self._options.shape)
        reference = self._reference(reference_plan(options.seed, shape))
        shape = shape.with_steps(self._program.steps(reference))
        self._run_all(plans(options.seed, shape), reference)
        return self.result(options.seed, options.ranks)

    def folder_of(self, plan: RoundPlan) -> Path:
        """Where a round runs."""
        return self._options.out / f"round-{plan.number:04d}"

    def replay(self, plan: RoundPlan) -> CampaignResult:
        """Runs one round."""
        if plan.hosts and (why := unavailable()):
            raise CampaignError(f"this round needs several hosts: {why}")
        reference = self._reference(dataclasses.replace(plan, faults=(), launcher=()))
        self._run_all(iter([plan]), reference)
        return self.result(plan.seed, plan.ranks)

    def result(self, seed: int, ranks: int) -> CampaignResult:
        """The result of the rounds that have ended so far."""
        with self._lock:
            rounds = sorted(self._rounds, key=lambda one: one.plan.number)
            failures = [failure for _, failure in sorted(self._failures.items())]
        return CampaignResult(
            seed=seed,
            ranks=ranks,
            command=self._options.command,
            jobs=self._options.jobs,
            machine=describe(),
            date=datetime.date.today().isoformat(),
            rounds=tuple(rounds),
            failures=tuple(failures),
            seconds=time.monotonic() - self._since,
        )

    def _run_all(self, upcoming: Iterator[RoundPlan], reference: object) -> None:
        def next_round() -> Callable[[], None] | None:
            plan = next(upcoming, None) if self._continues() else None
            if plan is None:
                return None
            with self._lock:
                self._faults += len(plan.all_faults)
            return functools.partial(self._run, plan, reference, side_by_side.check)

        side_by_side = SideBySide(self._options.jobs, next_round)

        # Closed: an error here must end the rounds that run.
        with contextlib.closing(side_by_side.results(self._look)) as ended:
            deque(ended, maxlen=0)
        self._look()

    def _look(self) -> None:
        """Tells the observer what has happened since."""
        while self._ended:
            self._observer.ended(self._ended.popleft())
        self._observer.running(dict(self._steps))

    def _possible(self, shape: Shape) -> Shape:
        """The shape with the kinds that are possible here."""
        of_hosts = [card for card in shape.kinds if card in OF_HOSTS]
        rest = tuple(card for card in shape.kinds if card not in OF_HOSTS)
        why = ""
        if of_hosts:
            can_share = hosts_for(shape.ranks)
            why = unavailable() if can_share else f"{shape.ranks} ranks cannot share them equally"
        if not why:
            return shape
        what = ", ".join(map(str, of_hosts))
        if not rest:
            raise CampaignError(f"without three hosts or more there is no {what}: {why}")
        self._observer.left_out(what, why)
        return dataclasses.replace(shape, kinds=rest)

    def _continues(self) -> bool:
        """Whether to start another round, now that others may be running."""
        options = self._options
        with self._lock:
            faults, longest = self._faults, self._longest
        if options.faults is not None and faults >= options.faults:
            return False
        if options.seconds is None or not longest:
            return True
        return time.monotonic() - self._since + longest <= options.seconds

    def _reference(self, plan: RoundPlan) -> Any:
        """The result of the undisturbed run."""
        names = _UNDISTURBED[: self._program.undisturbed_runs]
        folders = [
            self._new(self._options.out / f"reference{'-again' * again}")
            for again in range(len(names))
        ]
        # Nothing in it needs a standby process.
        surroundings = dataclasses.replace(self._surroundings, standby=0)

        def run(folder: Path, name: str) -> RoundResult:
            return self._one(plan, folder, name, None, side_by_side.check, surroundings)

        # In threads, as the rounds are: a signal raises an exception in the main thread, which
        # must not come between the start of a launcher and the code that ends it.
        tasks = (functools.partial(run, *each) for each in zip(folders, names, strict=True))
        side_by_side = SideBySide(self._options.jobs, lambda: next(tasks, None))
        with contextlib.closing(side_by_side.results(self._look)) as results:
            for folder, result in zip(folders, results, strict=True):
                if result.problems:
                    wrong = "; ".join(result.problems.lines())
                    raise CampaignError(f"the undisturbed run in {folder} failed: {wrong}")
        return self._program.result(folders)

    def _run(self, plan: RoundPlan, reference: object, check: Callable[[], None]) -> None:
        folder = self._new(self.folder_of(plan))
        one = functools.partial(
            self._one, reference=reference, check=check, surroundings=self._surroundings
        )
        try:
            result = one(plan, folder, f"round {plan.number}")
        except Cancelled:  # it has not failed
            self._remove(folder)
            raise
        with self._lock:
            self._faults += len(result.fired) - len(plan.all_faults)
            self._longest = max(self._longest, result.seconds)
            self._rounds.append(result)
        self._ended.append(result)
        if result.problems:
            self._shorten(result, folder, one)
        else:
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        if not self._options.keep:
            shutil.rmtree(folder)

    def _shorten(
        self, result: RoundResult, folder: Path, one: Callable[[RoundPlan, Path, str], RoundResult]
    ) -> None:
        plan = result.plan

        def note(shortened: RoundPlan, repeated: bool) -> None:
            (folder / "shortened.json").write_text(shortened.to_json())
            failure = Failure(
                result=result, shortened=shortened, repeated=repeated, folder=str(folder)
            )
            with self._lock:
                self._failures[plan.number] = failure

        note(plan, repeated=False)  # the campaign may be stopped before the plan is shortened
        numbers = itertools.count(1)

        def fails(faults: list[Fault]) -> bool:
            place = folder / f"shortening-{next(numbers):02d}"
            what = f"shortening round {plan.number} to {len(faults)} faults"
            return bool(one(plan.only(faults), place, what).problems)

        faults = list(plan.all_faults)
        repeated = self._options.shrink and fails(list(faults))
        if repeated:
            faults = list(shorten(faults, fails, _MOST_RUNS))
        note(plan.only(faults), repeated)

    def _one(
        self,
        plan: RoundPlan,
        folder: Path,
        what: str,
        reference: object | None,
        check: Callable[[], None],
        surroundings: Surroundings,
    ) -> RoundResult:
        def tell(step: int) -> None:
            check()
            self._steps[what] = step

        try:
            return run_round(plan, folder, reference, surroundings, tell)
        finally:
            self._steps.pop(what, None)

    def _new(self, folder: Path) -> Path:
        """Removes what an earlier campaign has left there."""
        if folder.exists():
            if not (folder / "plan.json").is_file():
                raise CampaignError(
                    f"{folder} exists, and no campaign has written it: pass another folder as --out"
                )
            shutil.rmtree(folder)
        return folder
