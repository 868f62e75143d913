"""What a campaign prints: a line while it runs, a line for each failed round, and the table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.status import Status

from outlast.campaign.campaign import Observer
from outlast.campaign.results import CampaignResult, Failure, RoundResult
from outlast.campaign.table import print_table


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
    console.print(f"Run it again: {replay}", highlight=False, markup=False, soft_wrap=True)
