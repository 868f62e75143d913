"""The campaign: rounds one after another, until enough faults have fired or the time is over."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from dataclasses import field
from pathlib import Path

from outlast.campaign.checks.result import Reference
from outlast.campaign.generate import Card, Shape, parse_kinds, plans, reference_plan
from outlast.campaign.plan import Fault, RoundPlan
from outlast.campaign.results import CampaignResult, Failure, RoundResult
from outlast.campaign.rounds.run_round import Surroundings, run_round
from outlast.campaign.shrink import shorten
from outlast.errors import OutlastError

LAUNCHER = (sys.executable, "-m", "outlast.launch", "run")
TRAINING = Path(__file__).with_name("training.py")

_MOST_RUNS = 12
"""Runs that shorten the plan of one failed round."""
_FEW = 6
"""Faults in each round of a campaign of limited time: a round is never cut short."""


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
        standby: how many standby processes each job has.
        keep: whether to keep the folders of all rounds.
        shrink: whether to shorten the plans of failed rounds.
        script: the training.
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
    per_round: int = 20
    standby: int = 2
    keep: bool = False
    shrink: bool = True
    script: Path = field(default_factory=lambda: TRAINING)
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
    """Hears how a campaign goes on; this one does nothing."""

    def running(self, what: str, step: int, fired: int) -> None:
        """A job has come to this step; `fired` faults of earlier rounds have fired."""

    def ended(self, result: RoundResult) -> None:
        """A round has ended."""


class CampaignError(OutlastError):
    """The undisturbed run has failed, so that nothing can be compared with it."""


class Campaign:
    """Runs the rounds of a campaign.

    Raises:
        CampaignError: if the undisturbed run fails.
    """

    def __init__(self, options: Options, observer: Observer | None = None) -> None:
        self._options = options
        self._observer = observer or Observer()
        self._surroundings = Surroundings(
            script=options.script,
            standby=options.standby,
            stall_s=options.stall_s,
            linger_s=options.linger_s,
            launcher=options.launcher,
        )
        self._since = time.monotonic()
        self._rounds: list[RoundResult] = []
        self._failures: list[Failure] = []
        self._runs = 0

    def run(self) -> CampaignResult:
        """Runs rounds as the options say."""
        options, shape = self._options, self._options.shape
        reference = self._reference(reference_plan(options.seed, shape))
        for plan in plans(options.seed, shape):
            if not self._continues():
                break
            self._run(plan, reference)
        return self._result(options.seed, options.ranks)

    def replay(self, plan: RoundPlan) -> CampaignResult:
        """Runs one round."""
        self._run(plan, self._reference(dataclasses.replace(plan, faults=(), launcher=())))
        return self._result(plan.seed, plan.ranks)

    def _continues(self) -> bool:
        options = self._options
        if options.faults is not None and self._fired() >= options.faults:
            return False
        if options.seconds is None or not self._rounds:
            return True
        longest = max(one.seconds for one in self._rounds)
        return time.monotonic() - self._since + longest <= options.seconds

    def _fired(self) -> int:
        return sum(len(one.fired) for one in self._rounds)

    def _reference(self, plan: RoundPlan) -> Reference:
        folder = self._folder("reference")
        result = self._one(plan, folder, None, "the undisturbed run")
        if result.problems:
            raise CampaignError(
                f"the undisturbed run in {folder} failed: {'; '.join(result.problems.lines())}"
            )
        return Reference.read(folder / "records")

    def _run(self, plan: RoundPlan, reference: Reference) -> None:
        folder = self._folder(f"round-{plan.number:04d}")
        result = self._one(plan, folder, reference, f"round {plan.number}")
        self._rounds.append(result)
        self._observer.ended(result)
        if result.problems:
            self._failures.append(self._shorten(result, folder, reference))
        elif not self._options.keep:
            shutil.rmtree(folder)

    def _shorten(self, result: RoundResult, folder: Path, reference: Reference) -> Failure:
        plan = result.plan

        def fails(faults: list[Fault]) -> bool:
            shorter = plan.only(faults)
            self._runs += 1
            place = folder / f"shortening-{self._runs:02d}"
            what = f"shortening round {plan.number} ({len(faults)} faults)"
            return bool(self._one(shorter, place, reference, what).problems)

        faults = list(plan.all_faults)
        repeated = self._options.shrink and fails(list(faults))
        if repeated:
            faults = list(shorten(faults, fails, _MOST_RUNS))
        shortened = plan.only(faults)
        (folder / "shortened.json").write_text(shortened.to_json())
        return Failure(result=result, shortened=shortened, repeated=repeated, folder=str(folder))

    def _one(
        self, plan: RoundPlan, folder: Path, reference: Reference | None, what: str
    ) -> RoundResult:
        fired = self._fired()

        def tell(step: int) -> None:
            self._observer.running(what, step, fired)

        return run_round(plan, folder, reference, self._surroundings, tell)

    def _folder(self, name: str) -> Path:
        folder = self._options.out / name
        if folder.exists():
            shutil.rmtree(folder)
        return folder

    def _result(self, seed: int, ranks: int) -> CampaignResult:
        return CampaignResult(
            seed=seed,
            ranks=ranks,
            rounds=tuple(self._rounds),
            failures=tuple(self._failures),
            seconds=time.monotonic() - self._since,
        )
