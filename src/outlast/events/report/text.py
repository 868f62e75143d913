"""The report as text, as JSON, and as a trace.

The text fits 80 columns. What is longer is wrapped: nothing is cut. Text from logs is printed
literally: never as markup and without control characters, since a message may contain anything.

The trace has Chrome's trace event format (JSON), for Perfetto (https://ui.perfetto.dev) and
chrome://tracing: a host is a process of the trace and a lane is a thread. Times are in microseconds
from the first event of the host with the longest wall time, by whose clock the others are placed.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outlast.events.report import sentences
from outlast.events.report.model import PHASE_FIELDS, HostTime, Party, RankRecovery, Restart, Span
from outlast.events.report.report import HostTimeline, Lane, Report
from outlast.events.report.sentences import PARTS, describe, one_line, plural, share
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


def render_report(report: Report, console: Console) -> None:
    """Prints `report` to `console`."""
    if report.command:
        console.print(Text(one_line(report.command)))
    console.print(Text(_ONLY_CHECKPOINTS) if report.source == "checkpoints" else _summary(report))
    if report.source == "launcher":
        console.print(Text("As the launcher saw it: the script does not use outlast.inprocess."))
    if goodput := sentences.describe_goodput(report):
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
    if report.last_lines:
        console.print(Text("Last lines of the launcher:"))
        console.print(Padding(Text(sentences.printable(report.last_lines)), (0, 0, 0, 2)))


def _summary(report: Report) -> Text:
    counts = {"rank": report.world_size, "host": len(report.hosts), "restart": report.restart_count}
    parts = [plural(count, noun) for noun, count in counts.items()]
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
            Text(sentences.cause_text(restart)),
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
    table = _table(f"Time on {one_line(host.host)}")
    table.show_header = False
    table.add_column(no_wrap=True)
    for _ in ("time", "share"):
        table.add_column(justify="right", no_wrap=True)
    rows = {PARTS[name][0]: seconds for name, seconds in sentences.parts_of(host).items()}
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


Event = dict[str, Any]


def to_trace(report: Report) -> str:
    """The states of each rank with the phases of its recoveries inside; marks are instants."""
    events = [
        event
        for number, host in enumerate(report.timeline, start=1)
        for event in _host(host, number, report)
    ]
    about = {"run": report.run_id, "command": report.command}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _host(host: HostTimeline, number: int, report: Report) -> Iterator[Event]:
    yield _name("process_name", host.host, number)
    shift = host.shift or 0.0
    recoveries: dict[int, list[RankRecovery]] = {}
    for restart in report.restarts:
        for rank in restart.ranks:
            if rank.host == host.host:
                recoveries.setdefault(rank.lane, []).append(rank)
    for thread, lane in enumerate(host.lanes, start=1):
        place = {"pid": number, "tid": thread}
        yield _name("thread_name", lane.name, number, tid=thread)
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}
        for count, span in enumerate(lane.spans):
            if lane.rank >= 0:
                yield _slice(span, shift, "state", place)
                continue
            for kind, moment in (("b", span.start), ("e", span.end)):  # saves may overlap
                own = {"ph": kind, "name": span.state, "cat": lane.name, "id": f"{number}-{count}"}
                yield {**own, "ts": _us(moment + shift), **place}
        for phase in _inside(lane, recoveries.get(lane.rank, [])):
            yield _slice(phase, shift, "phase", place)
        for mark in lane.marks:
            at = {"ts": _us(mark.at + shift), "args": {"text": mark.text}}
            yield {"ph": "i", "s": "t", "name": mark.kind, "cat": "mark", **at, **place}


def _inside(lane: Lane, recoveries: list[RankRecovery]) -> Iterator[Span]:
    """The phases within a lane's restarts, one after another: slices must not overlap by halves."""
    phases = [phase for each in recoveries for phase in each.phases]
    upcoming = deque(sorted(phases, key=lambda phase: phase.start))
    for span in lane.spans:
        if span.state != "restarting":
            continue
        begin = span.start  # of what no phase has filled yet
        while upcoming and upcoming[0].start < span.end:
            phase = upcoming.popleft()
            start, end = max(phase.start, begin), min(phase.end, span.end)
            if start < end:
                yield Span(state=phase.state, start=start, end=end)
                begin = end


def _slice(span: Span, shift: float, category: str, place: dict[str, int]) -> Event:
    start, end = _us(span.start + shift), _us(span.end + shift)
    own = {"ph": "X", "name": span.state, "cat": category}
    return {**own, "ts": start, "dur": end - start, **place}


def _name(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
