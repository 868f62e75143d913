"""The timeline of the page: a lane for each rank, by host, with marks for what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from outlast.events.report.html.elements import Markup, join, key, percent, section, tag
from outlast.events.report.html.thinning import ThinMark, ThinSpan, thin_marks, thin_spans
from outlast.events.report.model import HostTimeline, Lane, Report
from outlast.system.units import duration_text

ROW, TOP = 24, 26  # heights in pixels
_LANES, _SPANS, _MARKS = 96, 4000, 1000  # the most elements of each sort
_ZOOMS = (1, 4, 16)
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

STATES = {
    "training": "training",
    "starting": "starting",
    "restoring": "restoring",
    "restarting": "restarting",
    "hung": "no progress",
    "lost": "lost",
    "reserve": "in reserve",
    "saving": "saving",
}
MARKS = {
    "fault": "first cause",
    "consequence": "other fault",
    "injected": "planned fault",
    "takeover": "replaced",
    "restored": "restored",
    "not_saved": "save failed",
    "passed_over": "checkpoint passed over",
    "host_lost": "host lost",
    "host_joined": "host joined",
    "stop": "told to stop",
    "monitor_restarted": "monitor restarted",
    "mismatch": "replicas differ",
    "straggler": "slow rank",
}
_PATHS = {
    "fault": "M0-8 7 0 0 8-7 0Z",
    "consequence": "M0-6 5 0 0 6-5 0Z",
    "injected": "M2-9-4 1H0L-2 9 4-1H0Z",
    "takeover": "M-5-6 6 0-5 6Z",
    "restored": "M-6-3H6L0 6Z",
    "not_saved": "M-5-7 0-2 5-7 7-5 2 0 7 5 5 7 0 2-5 7-7 5-2 0-7-5Z",
    "passed_over": "M-6-2H6V2H-6Z",
    "host_lost": "M-6-6H6V6H-6Z",
    "host_joined": "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z",
    "stop": "M-3-7H3L7-3V3L3 7H-3L-7 3V-3Z",
    "monitor_restarted": "M-4-4H4V4H-4Z",
    "mismatch": "M-7-5H7V-1H-7ZM-7 1H7V5H-7Z",
    "straggler": "M-6-6H6L1 0 6 6H-6L-1 0Z",
}


@dataclasses.dataclass(frozen=True)
class _Row:
    """One line of the chart: a heading of a host, or a lane of it."""

    name: str
    lane: Lane | None
    shift: float


def timeline_section(report: Report) -> Markup:
    """The section; says so if there is nothing to show."""
    hosts = [host for host in report.timeline if host.lanes]
    if not hosts:
        return section("Timeline", "timeline", tag("p", "The events have no ranks to show."))
    begin = min((host.shift or 0.0 for host in hosts), default=0.0)
    end = max(host.end + (host.shift or 0.0) for host in hosts) - begin
    end = max(end, 1e-6)
    rows, left_out = _rows(hosts, begin)
    notes = []
    if len(hosts) > 1:
        notes.append(
            "Clocks of hosts are not compared: each host is placed so that it enters the function "
            "together with the others."
        )
    if left_out:
        notes.append(f"{left_out} more lanes are not shown; those with faults come first.")
    used = {span.state for row in rows if row.lane for span in row.lane.spans}
    marked = {mark.kind for row in rows if row.lane for mark in row.lane.marks}
    legend = key(((state, STATES[state]) for state in STATES if state in used), label="States")
    shapes = tag(
        "ul",
        *(tag("li", _shape_key(kind), MARKS[kind]) for kind in MARKS if kind in marked),
        class_="key",
        aria_label="Marks",
    )
    height = TOP + ROW * len(rows)
    drawn = tag(
        "svg",
        join(_ticks(end, height)),
        join(_drawn(rows, end)),
        width="100%",
        height=height,
        role="group",
        aria_label="Timeline of the ranks. Arrow keys move between marks.",
    )
    names = [
        tag("div", row.name, class_="host" if row.lane is None else None, title=row.name)
        for row in rows
    ]
    chart = tag(
        "div",
        tag("div", *names, class_="names", aria_hidden="true"),
        tag("div", tag("div", drawn, class_="canvas"), class_="view", tabindex=0, role="region",
            aria_label="Timeline, scrolls sideways when it is enlarged"),
        class_="lanes",
    )  # fmt: skip
    buttons = tag(
        "div",
        *(_button(zoom) for zoom in _ZOOMS),
        class_="zoom",
        role="group",
        aria_label="Enlarge the timeline",
    )
    told = [tag("p", note, class_="note") for note in notes]
    return section("Timeline", "timeline", buttons, legend, shapes, chart, *told)


def _button(zoom: int) -> Markup:
    pressed = "true" if zoom == 1 else "false"
    return tag("button", f"{zoom}x", type="button", data_zoom=zoom, aria_pressed=pressed)


def _rows(hosts: Sequence[HostTimeline], begin: float) -> tuple[list[_Row], int]:
    """The rows, and the number of lanes that are left out."""
    lanes = [(host, lane) for host in hosts for lane in host.lanes]
    ranked = sorted(lanes, key=lambda each: -sum(mark.kind == "fault" for mark in each[1].marks))
    shown = {id(lane) for _, lane in ranked[:_LANES]}
    rows = []
    for host in hosts:
        own = [lane for lane in host.lanes if id(lane) in shown]
        shift = (host.shift or 0.0) - begin
        if own:
            rows.append(_Row(host.host, None, shift))
        rows += [_Row(lane.name, lane, shift) for lane in own]
    return rows, len(lanes) - len(shown)


def _drawn(rows: Sequence[_Row], end: float) -> Iterable[Markup]:
    lanes = max(1, sum(row.lane is not None for row in rows))
    marks: list[Markup] = []
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        if row.lane is None:
            yield tag("line", x1=0, x2="100%", y1=y + ROW - 1, y2=y + ROW - 1, class_="rule")
            continue
        spans = thin_spans(row.lane.spans, max(40, _SPANS // lanes), end)
        yield tag(
            "g",
            *(_span(thin, row, y, end) for thin in spans),
            role="img",
            aria_label=f"{row.name}: {_shares(row.lane)}",
        )
        thinned = thin_marks(row.lane.marks, max(10, _MARKS // lanes), end)
        marks += [_mark(thin, row, y, end) for thin in thinned]
    yield from marks


def _span(thin: ThinSpan, row: _Row, y: int, end: float) -> Markup:
    span = thin.span
    often = f" in {thin.count} spans" if thin.count > 1 else ""
    state = STATES.get(span.state, span.state)
    tip = f"{row.name}: {state}, {duration_text(span.end - span.start)}{often}"
    return tag(
        "rect",
        x=percent((span.start + row.shift) / end),
        y=y + 4,
        width=percent((span.end - span.start) / end),
        height=ROW - 8,
        class_=f"c-{span.state}",
        data_tip=f"{tip}, from {_clock(span.start + row.shift)}",
    )


def _mark(thin: ThinMark, row: _Row, y: int, end: float) -> Markup:
    mark = thin.mark
    said = f"{MARKS.get(mark.kind, mark.kind)}: {mark.text[:300]}"
    more = f" (and {thin.more} more here)" if thin.more else ""
    tip = f"{row.name}, {_clock(mark.at + row.shift)}: {said}{more}"
    path = tag("path", d=_PATHS.get(mark.kind, _PATHS["fault"]))
    return tag(
        "svg",
        path,
        x=percent((mark.at + row.shift) / end),
        y=y + ROW // 2,
        class_=f"mark m-{mark.kind}",
        overflow="visible",
        tabindex=-1,
        role="img",
        aria_label=tip,
        data_tip=tip,
    )


def _shape_key(kind: str) -> Markup:
    path = tag("path", d=_PATHS[kind])
    drawn = tag("svg", path, x=9, y=9, class_=f"mark m-{kind}", overflow="visible")
    return tag("svg", drawn, width=18, height=18, aria_hidden="true")


def _shares(lane: Lane) -> str:
    """How long the lane was in each state, in words, for those who do not see the chart."""
    seconds: dict[str, float] = {}
    for span in lane.spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.end - span.start
    longest = sorted(seconds.items(), key=lambda each: -each[1])
    said = [f"{STATES.get(state, state)} {duration_text(time)}" for state, time in longest]
    return ", ".join(said) or "no states"


def _ticks(end: float, height: int) -> Iterable[Markup]:
    done: set[float] = set()
    for zoom in _ZOOMS:
        step = next((s for s in _STEPS if end / s <= 9 * zoom), _STEPS[-1] * max(1, end // 864000))
        moments = [number * step for number in range(int(end / step) + 1) if number < 400]
        for moment in moments:
            if moment in done or moment > 0.97 * end:
                continue
            done.add(moment)
            x = percent(moment / end)
            line = tag("line", x1=x, x2=x, y1=TOP - 6, y2=height)
            yield tag(
                "g", line, tag("text", _clock(moment), x=x, y=13, dx=3), class_=f"tick z{zoom}"
            )


def _clock(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{seconds:.3g} s"
