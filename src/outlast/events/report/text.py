"""The report as text: the run in one line, tables, and a few sentences for each restart; or JSON.

Everything fits 80 columns. What is longer is wrapped: nothing is cut. Text from logs is printed
literally: never as markup and without control characters, since a message may contain anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outlast.events.report.builder import build
from outlast.events.report.model import PHASE_FIELDS, HostTime, Party, Restart
from outlast.events.report.report import Report
from outlast.events.report.sentences import describe, describe_goodput
from outlast.events.report.words import PARTS, cause_text, one_line, parts_of, plural, share
from outlast.events.run_folders import load
from outlast.system.units import duration_text

_ONLY_CHECKPOINTS = (
    "The logs have only events of checkpoints. Starts and restarts are recorded by `outlast run "
    "--events-dir` and by outlast.inprocess.Wrapper."
)


def to_json(report: Report) -> str:
    """The report as a JSON object; its fields are those of the dataclasses."""
    without = [dataclasses.replace(restart, ranks=()) for restart in report.restarts]
    values = dataclasses.asdict(dataclasses.replace(report, restarts=tuple(without)))
    for restart in values["restarts"]:
        del restart["ranks"]  # the trace has them
    return json.dumps(values, indent=2)


def render(directory: str | os.PathLike[str], console: Console) -> None:
    """Reads the logs of the newest run in `directory` and prints their report.

    Raises:
        EventLogError: see `load`.
    """
    render_report(build(load(directory)), console)


def render_report(report: Report, console: Console) -> None:
    """Prints `report` to `console`."""
    if report.command:
        console.print(Text(one_line(report.command)))
    console.print(Text(_ONLY_CHECKPOINTS) if report.source == "checkpoints" else _summary(report))
    if report.source == "launcher":
        console.print(Text("As the launcher saw it: the script does not use outlast.inprocess."))
    if goodput := describe_goodput(report):
        console.print(Text(goodput))
    if report.restarts:
        console.print()
        console.print(_restart_table(report.restarts))
        if report.source == "wrapper":
            console.print(_phase_table(report.restarts))
        for sentence in describe("recovery", report):
            console.print(Text(sentence))
        console.print()
        for number, restart in enumerate(report.restarts, start=1):
            (title,) = describe("title", number, restart, report)
            console.print(Text(title, style="bold"))
            for sentence in describe("restart", restart, report):
                console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    console.print()
    for host in report.hosts:
        if host.goodput is not None:
            console.print(_time_table(host, report))
    for sentence in describe("ending", report):
        console.print(Text(sentence))


def _summary(report: Report) -> Text:
    counts = (report.world_size, "rank"), (len(report.hosts), "host")
    parts = [plural(count, noun) for count, noun in (*counts, (report.restart_count, "restart"))]
    if report.source == "wrapper":  # otherwise all processes are restarted together
        parts.append(f"{report.lost} lost, {report.replaced} replaced")
    if report.goodput is not None:
        parts.append(f"goodput {share(report.goodput)}")
    return Text(" · ".join(parts), style="bold")


def _restart_table(restarts: Iterable[Restart]) -> Table:
    table = _table("What happened", right=("#", "at"))
    table.add_column("first cause", overflow="fold")
    for heading in ("lost ranks", "joined"):
        table.add_column(heading, overflow="fold", max_width=10)
    table.add_column("ranks", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for number, restart in enumerate(restarts, start=1):
        seconds = restart.phases.total
        total = "-" if seconds is None else duration_text(seconds)
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


def _phase_table(restarts: Sequence[Restart]) -> Table:
    title = "Duration of each phase (of the slowest survivor, in ms)"
    table = _table(title, right=("#", *PHASE_FIELDS))
    for number, restart in enumerate(restarts, start=1):
        seconds = (getattr(restart.phases, field) for field in PHASE_FIELDS.values())
        table.add_row(str(number), *map(_milliseconds, seconds))
    table.caption = "leave: since the abort ended; term, start: barriers, of the last to arrive"
    return table


def _time_table(host: HostTime, report: Report) -> Table:
    """What the wall time of a host was used for."""
    table = _table(f"Time on {one_line(host.host)}")
    table.show_header = False
    table.add_column(no_wrap=True)
    for _ in ("time", "share"):
        table.add_column(justify="right", no_wrap=True)
    rows = {PARTS[name][0]: seconds for name, seconds in parts_of(host).items()}
    first = "start" if report.source == "launcher" else "entry"
    rows[f"total, from the first {first} to the end"] = host.wall_seconds
    for name, seconds in rows.items():
        if seconds > 0 or name == "productive":
            table.add_row(name, duration_text(seconds), share(seconds / host.wall_seconds))
    return table


def _table(title: str, right: Iterable[str] = ()) -> Table:
    """A table whose first columns are numbers."""
    table = Table(
        title=Text(title, style="italic"),  # not a str: a host's name is no markup
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _ranks(parties: Iterable[Party]) -> str:
    return ", ".join(str(party.rank) for party in parties) or "-"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 10:  # all columns must fit
        return f"{seconds:.0f} s"
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:,.0f}"
