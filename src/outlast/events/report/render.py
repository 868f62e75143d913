"""Prints a report: the run in one line, two tables, and a few sentences for each restart; or JSON.

Text from logs is printed literally: never as markup and without control characters, since a
message may contain anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outlast.events.report.builder import build
from outlast.events.report.log_reader import load
from outlast.events.report.model import Party, Report, Restart
from outlast.events.report.sentences import (
    cause_text,
    describe_restart,
    describe_saves,
    duration,
    one_line,
    plural,
    restart_title,
    share,
)

_PHASES = {
    "detect": "detection",
    "abort": "abort",
    "leave": "interrupt",
    "finalize": "finalize",
    "health": "health_check",
    "term": "termination_barrier",
    "assign": "assignment",
    "start": "start_barrier",
    "init": "initialize",
    "total": "total",
}


def to_json(report: Report) -> str:
    """The report as a JSON object; its fields are those of the dataclasses."""
    return json.dumps(dataclasses.asdict(report), indent=2)


def render(directory: str | os.PathLike[str], console: Console) -> None:
    """Reads the logs of the newest run in `directory` and prints their report.

    Raises:
        EventLogError: see `load`.
    """
    render_report(build(load(directory)), console)


def render_report(report: Report, console: Console) -> None:
    """Prints `report` to `console`."""
    console.print(_summary(report))
    if report.restarts:
        console.print()
        console.print(_restart_table(report.restarts, console.width))
        console.print(_phase_table(report.restarts))
        console.print()
        for number, restart in enumerate(report.restarts, start=1):
            console.print(Text(restart_title(number, restart, report.calls), style="bold"))
            for sentence in describe_restart(restart):
                console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    console.print()
    for sentence in _ending(report):
        console.print(Text(sentence))


def _summary(report: Report) -> Text:
    parts = [
        plural(report.world_size, "rank"),
        plural(len(report.hosts), "host"),
        plural(len(report.restarts), "restart"),
        f"{report.lost} lost, {report.replaced} replaced",
        f"{duration(report.recovery_seconds)} in recovery",
    ]
    if report.goodput is not None:
        parts.append(f"goodput {share(report.goodput)}")
    return Text(" · ".join(parts), style="bold")


def _restart_table(restarts: Iterable[Restart], width: int) -> Table:
    table = _table("What happened")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    # The only column without a limit: it gets the width left by the others at their widest.
    table.add_column("first cause", no_wrap=True, overflow="ellipsis", max_width=width - 54)
    table.add_column("lost", no_wrap=True, overflow="ellipsis", max_width=10)
    table.add_column("joined", no_wrap=True, overflow="ellipsis", max_width=10)
    table.add_column("ranks", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for number, restart in enumerate(restarts, start=1):
        seconds = restart.phases.total
        total = "-" if seconds is None else duration(seconds)
        table.add_row(
            str(number),
            f"{restart.at:.3f} s",
            Text(cause_text(restart)),
            _ranks(restart.lost),
            _ranks(restart.joined),
            f"{restart.world_size_before} → {restart.world_size_after or '-'}",
            total if restart.resumed else Text("ended", style="bold red"),
        )
    return table


def _phase_table(restarts: Iterable[Restart]) -> Table:
    table = _table("Duration of each phase (of the slowest survivor, in ms)")
    table.add_column("#", justify="right", no_wrap=True)
    for name in _PHASES:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    for number, restart in enumerate(restarts, start=1):
        seconds = (getattr(restart.phases, field) for field in _PHASES.values())
        table.add_row(str(number), *map(_milliseconds, seconds))
    table.caption = "leave: from the end of the abort; term, start: barriers, of the last to arrive"
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="italic",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        expand=False,
    )


def _ending(report: Report) -> list[str]:
    completed = plural(report.completed, "rank") if report.completed else "No rank is known to have"
    sentences = [f"{completed} completed the function."]
    for host in report.hosts:
        if host.goodput is not None:
            sentences.append(
                f"{one_line(host.host)}: {duration(host.wall_seconds)} from the first entry to the "
                f"end, {share(host.goodput)} of it with all current ranks in the function."
            )
    if report.saves is not None:
        sentences += [one_line(sentence) for sentence in describe_saves(report.saves)]
    if report.monitors_restarted:
        sentences.append(f"{plural(report.monitors_restarted, 'monitor process')} restarted.")
    for party in report.waiting:
        sentences.append(
            f"A process on {one_line(party.host)} asked to join and was never admitted."
        )
    if report.notes:
        counted = ", ".join(f"{one_line(name)} {count}" for name, count in report.notes.items())
        sentences.append(f"Notes: {counted}.")
    for file in report.torn_logs:
        sentences.append(
            f"{one_line(file)}: the last line is torn (its process died while writing it) and was "
            "skipped."
        )
    return sentences


def _ranks(parties: Iterable[Party]) -> str:
    return ", ".join(str(party.rank) for party in parties) or "-"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:,.0f}"
