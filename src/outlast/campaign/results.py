"""The result of a round and of a campaign, as plain dataclasses; `to_json` writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from outlast.campaign.plan import RoundPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fired:
    """A fault that has fired.

    Attributes:
        kind: of a fault plan, or the action on the launcher.
        phase: where in the training it fired.
        rank: the rank; -1 for the launcher.
        seen: seconds until the last survivor had seen it; `None` if it caused no restart.
        back: seconds until the last survivor was in the training function again.
        redone: how many steps were trained again; `None` if it is not known.
    """

    kind: str
    phase: str = "step"
    rank: int = -1
    step: int = -1
    seen: float | None = None
    back: float | None = None
    redone: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problems:
    """What was wrong with a round, in words; all empty if nothing was.

    Attributes:
        differences: from the undisturbed run, or no result at all.
        orphans: processes that outlived their launcher.
        leaks: descriptors and threads that grew with each restart.
        leftovers: temporary files and unfinished checkpoints.
        believed: damaged checkpoints that were committed, or uncommitted ones that were restored.
    """

    differences: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    believed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(dataclasses.astuple(self))

    def lines(self) -> list[str]:
        """Each problem with its kind."""
        return [
            f"{field.name}: {text}"
            for field in dataclasses.fields(self)
            for text in getattr(self, field.name)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The result of a round.

    Attributes:
        fired: the faults that have fired; a planned one may come too late.
        exit_codes: of its launchers, in order.
        wall_seconds, productive_seconds: of the job, as its report says.
        seconds: of the whole round, with its starts and checks.
    """

    plan: RoundPlan
    fired: tuple[Fired, ...]
    problems: Problems
    exit_codes: tuple[int, ...]
    wall_seconds: float
    productive_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A round with problems, and the shortest plan found that still has some.

    Attributes:
        repeated: whether the round failed again with the whole plan.
        folder: where the plans, logs and events are.
    """

    result: RoundResult
    shortened: RoundPlan
    repeated: bool
    folder: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """The result of a campaign.

    Attributes:
        command: the user's script and its arguments; empty for the training of the campaign.
        jobs: how many rounds ran at the same time.
        machine: on which it ran.
        date: on which it ended.
        seconds: of the whole campaign.
    """

    seed: int
    ranks: int
    command: tuple[str, ...] = ()
    jobs: int = 1
    machine: str = ""
    date: str = ""
    rounds: tuple[RoundResult, ...]
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def fired(self) -> list[Fired]:
        """The faults of all rounds."""
        return [fault for one in self.rounds for fault in one.fired]

    @property
    def goodput(self) -> float | None:
        """The productive share of the wall time of all rounds."""
        wall = sum(one.wall_seconds for one in self.rounds)
        return sum(one.productive_seconds for one in self.rounds) / wall if wall else None

    def count(self, problem: str) -> int:
        """The number of problems of a kind: the name of a field of `Problems`."""
        return sum(len(getattr(one.problems, problem)) for one in self.rounds)

    def to_json(self) -> str:
        """All of it, for programs."""
        values = {
            "seed": self.seed,
            "ranks": self.ranks,
            "command": list(self.command),
            "jobs": self.jobs,
            "machine": self.machine,
            "date": self.date,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "faults": len(self.fired),
            "rounds": [_round(one) for one in self.rounds],
            "failures": [
                {
                    "round": one.result.plan.number,
                    "problems": one.result.problems.lines(),
                    "repeated": one.repeated,
                    "shortened": json.loads(one.shortened.to_json()),
                    "folder": one.folder,
                }
                for one in self.failures
            ],
        }
        return json.dumps(values, indent=2)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them are; the nearest one that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _round(one: RoundResult) -> dict[str, object]:
    values = dataclasses.asdict(one)
    values["plan"] = json.loads(one.plan.to_json())
    return values
