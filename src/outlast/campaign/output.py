"""What a campaign prints: a line while it runs, a line for each round, and the table of what each
kind of fault has cost, with the totals.

In a page that has the lines `<!-- campaign: begin -->` and `<!-- campaign: end -->`, the table is
written between them.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table

from outlast.campaign.campaign import Observer
from outlast.campaign.results import (
    CampaignResult,
    Failure,
    Fired,
    Problems,
    RoundResult,
    percentile,
)

HEADINGS = ("kind", "count", "seen within", "back within", "steps redone")
_BEGIN, _END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
_NOTE = "seen, back: median and maximum, in seconds from the fault"


class ProgressLine(Observer):
    """The state of a running campaign on one line of a terminal; elsewhere, a line per round.

    Args:
        faults: how many faults are to be fired; `None` if that is not known.
    """

    def __init__(self, console: Console, status: Status, faults: int | None) -> None:
        self._console = console
        self._status = status
        self._all = "" if faults is None else f" of {faults}"
        self._fired = 0
        self._failed = 0

    def running(self, steps: Mapping[str, int]) -> None:
        failed = f", {self._failed} rounds failed" if self._failed else ""
        jobs = "".join(f"; {what}: step {step}" for what, step in steps.items())
        self._status.update(f"{self._fired}{self._all} faults{failed}{jobs}")

    def ended(self, result: RoundResult) -> None:
        self._fired += len(result.fired)
        self._failed += bool(result.problems)
        verdict = "FAILED" if result.problems else "identical"
        count, planned = len(result.fired), len(result.plan.all_faults)
        # One that is planned for a moment that never comes does not fire.
        faults = f"{count} faults" if count == planned else f"{count} of {planned} planned faults"
        fired = f"{faults} in {result.seconds:.0f} s"
        line = f"round {result.plan.number}: {fired}, {verdict}; {self._fired}{self._all} faults"
        self._console.print(line, highlight=False)
        for problem in result.problems.lines():
            self._console.print(f"  {problem}", highlight=False, markup=False, soft_wrap=True)

    def left_out(self, what: str, why: str) -> None:
        self._console.print(f"without {what}: {why}", highlight=False, soft_wrap=True)


def print_result(result: CampaignResult, console: Console) -> None:
    """Prints the table, and how to repeat each failure."""
    print_table(result, console)
    for failure in result.failures:
        _print_failure(failure, result, console)


def rows(fired: Sequence[Fired]) -> list[tuple[str, ...]]:
    """A row for each kind, by name, and one for all."""
    kinds: dict[str, list[Fired]] = defaultdict(list)
    for one in fired:
        kinds[one.kind].append(one)
    return [_row(kind, of_kind) for kind, of_kind in sorted(kinds.items())] + [_row("all", fired)]


def totals(result: CampaignResult) -> list[tuple[str, str]]:
    """The totals, each with its name."""
    count = len(result.fired)
    rate = f" ({result.seconds / count:.1f} s each)" if count else ""
    goodput = "unknown" if result.goodput is None else f"{result.goodput:.0%}"
    problems = [
        (field.name, str(result.count(field.name))) for field in dataclasses.fields(Problems)
    ]
    return [
        ("faults", str(count)),
        ("rounds", str(len(result.rounds))),
        ("time", f"{result.seconds / 60:.1f} min{rate}"),
        ("goodput", goodput),
        *problems,
    ]


def print_table(result: CampaignResult, console: Console) -> None:
    """Prints both to a terminal."""
    table = Table(title=f"Campaign with seed {result.seed}, {result.ranks} ranks", caption=_NOTE)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    found = rows(result.fired)
    for row in found[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*found[-1])
    console.print(table)
    console.print(", ".join(f"{name}: {value}" for name, value in totals(result)))


def markdown(result: CampaignResult) -> str:
    """Both as Markdown, with the date and the machine."""
    sides = "one round at a time" if result.jobs == 1 else f"{result.jobs} rounds at the same time"
    lines = [
        f"Seed {result.seed}, {result.ranks} ranks, {sides}; {result.date}, on {result.machine}.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|" + "--:|" * (len(HEADINGS) - 1),
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows(result.fired)]
    lines += ["", f"({_NOTE.capitalize()}.)", "", "| | |", "|---|--:|"]
    lines += [f"| {name} | {value} |" for name, value in totals(result)]
    return "\n".join(lines) + "\n"


def write_markdown(result: CampaignResult, path: Path) -> None:
    """Writes it between the markers of a page; to a file without markers, after all else."""
    text = markdown(result)
    lines = path.read_text().splitlines() if path.exists() else []
    if _BEGIN in lines and _END in lines[lines.index(_BEGIN) :]:
        before, rest = lines[: lines.index(_BEGIN) + 1], lines[lines.index(_BEGIN) :]
        text = "\n".join([*before, "", text, *rest[rest.index(_END) :], ""])
    elif lines:
        text = "\n".join([*lines, "", text])
    path.write_text(text)


def _row(kind: str, fired: Sequence[Fired]) -> tuple[str, ...]:
    redone = [one.redone for one in fired if one.redone is not None]
    return (
        kind.replace("_", " "),
        str(len(fired)),
        _spread([one.seen for one in fired]),
        _spread([one.back for one in fired]),
        str(sum(redone)) if redone else "-",
    )


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{percentile(known, 0.5):.2f} / {max(known):.2f}" if known else "-"


def _print_failure(failure: Failure, result: CampaignResult, console: Console) -> None:
    plan = failure.shortened
    console.print(
        f"Round {plan.number} of seed {result.seed} failed. Its logs and events: {failure.folder}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if failure.repeated:
        before, after = len(failure.result.plan.all_faults), len(plan.all_faults)
        console.print(f"Shortened from {before} to {after} faults:", highlight=False)
    else:
        console.print(
            "It was not shortened: it did not fail again, or was not run again. The plan:"
        )
    console.print(plan.to_json(), highlight=False, markup=False)
    replay = f"outlast chaos campaign --replay {shlex.quote(failure.folder)}/shortened.json"
    if result.command:
        replay += f" -- {shlex.join(result.command)}"
    console.print(f"Run it again: {replay}", highlight=False, markup=False, soft_wrap=True)
