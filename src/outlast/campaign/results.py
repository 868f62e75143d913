"""The results of a campaign, and how they are shown: a line while it runs, a line for each round,
the table of what each kind of fault has cost, with the totals, and all of it as JSON.

In a page that has the lines `<!-- campaign: begin -->` and `<!-- campaign: end -->`, the table is
written between them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markdown import Markdown
from rich.status import Status

from outlast.campaign.environment import describe
from outlast.campaign.plan import RoundPlan

PROBLEMS = ("differences", "orphans", "leaks", "leftovers", "believed")
"""What may be wrong with a round:

- differences: from the undisturbed run, or no result at all;
- orphans: processes that outlived their launcher;
- leaks: descriptors and threads that grew with each restart;
- leftovers: temporary files and unfinished checkpoints;
- believed: damaged checkpoints that were committed, or uncommitted ones that were restored.
"""

_BEGIN, _END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
_OF_FAILURES = ("shortened", "repeated", "folder")
_NOTE = (
    "Named: restarts whose first cause is the process of the fault, of those that one fault alone "
    "has caused. Seen, back: median and maximum, in seconds from the fault."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fired:
    """A fault that has fired."""

    kind: str  # of a fault plan, or the action on the launcher
    phase: str = "step"  # where in the training it fired
    rank: int = -1  # the rank; -1 for the launcher
    step: int = -1
    # seconds until the last survivor had seen it; `None` if it caused no restart
    seen: float | None = None
    back: float | None = None  # seconds until the last survivor was in the training function again
    redone: int | None = None  # how many steps were trained again; `None` if it is not known
    # whether the restart names the process of the fault; `None` without a restart, or if another
    # fault was there at the same time
    named: bool | None = None


@dataclasses.dataclass(kw_only=True)
class RoundResult:
    """The result of a round."""

    plan: RoundPlan
    # the faults that have fired; a planned one may come too late
    fired: list[Fired] = field(default_factory=list)
    # what was wrong, by kind, in words
    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in PROBLEMS})
    unexplained: list[str] = field(default_factory=list)  # restarts that no fault has caused
    exit_codes: list[int] = field(default_factory=list)  # of its launchers, in order
    # of the job, as its report says
    wall_seconds: float = 0.0
    productive_seconds: float = 0.0
    seconds: float = 0.0  # of the whole round, with its starts and checks
    # of a failed round, the shortest plan found that still has problems
    shortened: RoundPlan | None = None
    repeated: bool = False  # whether it failed again with the whole plan
    folder: str = ""  # of a failed round, with its plans, logs and events

    def wrong(self) -> list[str]:
        return [f"{kind}: {text}" for kind, texts in self.problems.items() for text in texts]

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; `CampaignResult.to_json` lists the failures apart."""
        values = dataclasses.asdict(self).items()
        return {name: value for name, value in values if name not in _OF_FAILURES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """The result of a campaign."""

    seed: int
    ranks: int
    device: str = "cpu"  # of the campaign's own training
    # the user's script and its arguments; empty for the training of the campaign
    command: Sequence[str] = ()
    jobs: int = 1  # how many rounds ran at the same time
    rounds: Sequence[RoundResult]
    seconds: float  # of the whole campaign

    @property
    def fired(self) -> list[Fired]:
        return [fault for one in self.rounds for fault in one.fired]

    @property
    def failures(self) -> list[tuple[RoundResult, RoundPlan]]:
        """The rounds that have failed, with the shortened plan of each."""
        return [(one, one.shortened) for one in self.rounds if one.shortened is not None]

    @property
    def goodput(self) -> float | None:
        """The productive share of the wall time of all rounds."""
        wall = sum(one.wall_seconds for one in self.rounds)
        return sum(one.productive_seconds for one in self.rounds) / wall if wall else None

    def totals(self) -> dict[str, str]:
        count = len(self.fired)
        rate = f" ({self.seconds / count:.1f} s each)" if count else ""
        return {
            "faults": str(count),
            "rounds": str(len(self.rounds)),
            "time": f"{self.seconds / 60:.1f} min{rate}",
            "goodput": "unknown" if self.goodput is None else f"{self.goodput:.0%}",
            "restarts without a fault": str(sum(len(one.unexplained) for one in self.rounds)),
            **{kind: str(sum(len(one.problems[kind]) for one in self.rounds)) for kind in PROBLEMS},
        }

    def table(self) -> str:
        kinds: dict[str, list[Fired]] = defaultdict(list)
        for fault in self.fired:
            kinds[fault.kind].append(fault)
        lines = [
            "| kind | count | named | seen within | back within | steps redone |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for kind, faults in [*sorted(kinds.items()), ("all", self.fired)]:
            redone = [one.redone for one in faults if one.redone is not None]
            seen = _spread(one.seen for one in faults)
            back = _spread(one.back for one in faults)
            name = kind.replace("_", " ")
            judged = [one.named for one in faults if one.named is not None]
            named = f"{sum(judged)} of {len(judged)}" if judged else "-"
            lines.append(
                f"| {name} | {len(faults)} | {named} | {seen} | {back} "
                f"| {sum(redone) if redone else '-'} |"
            )
        return "\n".join([*lines, "", f"({_NOTE})", ""])

    def markdown(self) -> str:
        sides = "one round at a time" if self.jobs == 1 else f"{self.jobs} rounds at the same time"
        day = datetime.date.today().isoformat()
        where = "" if self.device == "cpu" else f" on {self.device}"
        first = f"Seed {self.seed}, {self.ranks} ranks{where}, {sides}; {day}, on {describe()}.\n"
        totals = [f"| {name} | {value} |" for name, value in self.totals().items()]
        return "\n".join([first, self.table(), "| | |", "|---|--:|", *totals, ""])

    def to_json(self) -> str:
        values = {
            **vars(self),
            "machine": describe(),
            "date": datetime.date.today().isoformat(),
            "goodput": self.goodput,
            "faults": len(self.fired),
            "rounds": [one.to_dict() for one in self.rounds],
            "failures": [
                {
                    "round": one.plan.number,
                    "problems": one.wrong(),
                    "repeated": one.repeated,
                    "shortened": shortened,
                    "folder": one.folder,
                }
                for one, shortened in self.failures
            ],
        }
        return json.dumps(values, indent=2, default=msgspec.to_builtins)


class Display:
    """Shows a campaign on a terminal: its state on one line; elsewhere, a line per round."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        # how many faults are to be fired; `None` if that is not known
        self.faults: int | None = None
        self._fired = 0
        self._failed = 0

    def running(self, steps: Mapping[str, int]) -> None:
        failed = f", {self._failed} rounds failed" if self._failed else ""
        jobs = "".join(f"; {what}: step {step}" for what, step in steps.items())
        self._status.update(f"{self._so_far()}{failed}{jobs}")

    def ended(self, result: RoundResult) -> None:
        """A round has ended. One that failed is shortened after that."""
        wrong = result.wrong()
        self._fired += len(result.fired)
        self._failed += bool(wrong)
        count, planned = len(result.fired), len(result.plan.all_faults)
        # One that is planned for a moment that never comes does not fire.
        faults = f"{count} faults" if count == planned else f"{count} of {planned} planned faults"
        fired = f"{faults} in {result.seconds:.0f} s, {'FAILED' if wrong else 'identical'}"
        self.line(f"round {result.plan.number}: {fired}; {self._so_far()}")
        for problem in wrong:
            self.line(f"  {problem}")

    def result(self, result: CampaignResult) -> None:
        self.line(f"Campaign with seed {result.seed}, {result.ranks} ranks")
        self._console.print(Markdown(result.table()))
        self.line(", ".join(f"{name}: {value}" for name, value in result.totals().items()))
        for failed, plan in result.failures:
            self.line(
                f"Round {plan.number} of seed {result.seed} failed. Its logs and events: "
                f"{failed.folder}"
            )
            before, after = len(failed.plan.all_faults), len(plan.all_faults)
            if failed.repeated:
                self.line(f"Shortened from {before} to {after} faults:")
            else:
                self.line(
                    "It was not shortened: it did not fail again, or was not run again. The plan:"
                )
            self.line(plan.to_json())
            replay = f"outlast chaos campaign --replay {shlex.quote(failed.folder)}/shortened.json"
            script = f" --device {result.device}" if result.device != "cpu" else ""
            script += f" -- {shlex.join(result.command)}" if result.command else ""
            self.line(f"Run it again: {replay}{script}")

    def _so_far(self) -> str:
        return f"{self._fired}{'' if self.faults is None else f' of {self.faults}'} faults"

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def write_markdown(result: CampaignResult, path: Path) -> None:
    """Writes it between the markers of a page; to a file without markers, after all else."""
    text = result.markdown()
    lines = path.read_text().splitlines() if path.exists() else []
    if _BEGIN in lines and _END in lines[lines.index(_BEGIN) :]:
        before, rest = lines[: lines.index(_BEGIN) + 1], lines[lines.index(_BEGIN) :]
        text = "\n".join([*before, "", text, *rest[rest.index(_END) :], ""])
    elif lines:
        text = "\n".join([*lines, "", text])
    path.write_text(text)


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{known[len(known) // 2]:.2f} / {known[-1]:.2f}" if known else "-"
