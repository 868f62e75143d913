"""The results of `make gpu`: one JSON file, and one page that says the same."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.sheets import Sheet, to_markdown

__all__ = ["Figure", "Outcome", "Results", "read_junit"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A test, its `outcome` (passed, failed or skipped), and why it did not pass."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measurement and the physical limit that was measured in the same run, in the same unit.

    Attributes:
        limit: what the hardware needs at least; `None` if there is no such limit.
        limit_name: how the limit was measured.
        error: why there is no measurement; then `value` is `None`.
    """

    name: str
    unit: str
    value: float | None
    limit: float | None = None
    limit_name: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """The measurement, as a multiple of the limit."""
        if self.value is None or not self.limit:
            return None
        return self.value / self.limit


@dataclasses.dataclass(frozen=True)
class Results:
    """All of a run."""

    machine: dict[str, str]
    tests: Sequence[Outcome]
    figures: Sequence[Figure]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything ran, and nothing failed. Without a test that passed, nothing did."""
        failed = any(test.outcome == FAILED for test in self.tests)
        some = any(test.outcome == PASSED for test in self.tests)
        return some and not failed and not any(f.error for f in self.figures)

    def write(self, folder: Path) -> None:
        """Writes results.json and results.md."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(self.to_json())
        (folder / "results.md").write_text(self.to_markdown())

    def to_json(self) -> str:
        """All facts, and the ratios."""
        values = dataclasses.asdict(self)
        for figure, entry in zip(self.figures, values["figures"], strict=True):
            entry["ratio"] = figure.ratio
        return json.dumps({"passed": self.passed, **values}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """A page with a table of the figures and one of the tests."""
        count = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
        for test in self.tests:
            count[test.outcome] += 1
        summary = ", ".join(f"{number} {kind}" for kind, number in count.items())
        lines = ["# outlast on a GPU", "", f"{summary}; {self.seconds:.0f} s.", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        figures = [
            (
                figure.name,
                figure.error or _number(figure.value, figure.unit),
                _number(figure.limit, figure.unit),
                "-" if figure.ratio is None else f"{figure.ratio:.2f}",
                figure.limit_name or "-",
            )
            for figure in self.figures
        ]
        tests = [
            (test.name, f"{test.outcome}: {test.reason}" if test.reason else test.outcome)
            for test in self.tests
        ]
        columns = ("", "measured", "limit", "ratio", "the limit is")
        return "\n".join(
            [
                *lines,
                "",
                to_markdown(Sheet("Figures", columns, figures)),
                to_markdown(Sheet("Tests", ("", "outcome"), tests)),
            ]
        )


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}"


def read_junit(path: Path) -> list[Outcome]:
    """The outcomes of tests in a JUnit file of pytest."""
    found = []
    for case in ET.parse(path).getroot().iter("testcase"):
        if not case.get("name"):
            continue  # the one in which pytest was interrupted
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name', '')}"
        outcome, reason = PASSED, ""
        for tag, kind in (("skipped", SKIPPED), ("failure", FAILED), ("error", FAILED)):
            element = case.find(tag)
            if element is not None:
                outcome, reason = kind, (element.get("message") or "").partition("\n")[0]
        found.append(Outcome(name, outcome, float(case.get("time", 0)), reason.replace("|", "/")))
    return found
