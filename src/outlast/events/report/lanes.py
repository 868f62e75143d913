"""The timeline as the page draws it: rows of rectangles and marks, reduced to a bounded number of
elements so that nothing rare disappears.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from outlast.events.report.model import Span
from outlast.events.report.report import Mark, Report
from outlast.system.units import duration_text

ZOOMS = (1, 4, 16)
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
    "fault": ("first cause", "M0-8 7 0 0 8-7 0Z"),
    "consequence": ("other fault", "M0-6 5 0 0 6-5 0Z"),
    "injected": ("planned fault", "M2-9-4 1H0L-2 9 4-1H0Z"),
    "takeover": ("replaced", "M-5-6 6 0-5 6Z"),
    "restored": ("restored", "M-6-3H6L0 6Z"),
    "not_saved": ("save failed", "M-5-7 0-2 5-7 7-5 2 0 7 5 5 7 0 2-5 7-7 5-2 0-7-5Z"),
    "passed_over": ("checkpoint passed over", "M-6-2H6V2H-6Z"),
    "host_lost": ("host lost", "M-6-6H6V6H-6Z"),
    "host_joined": ("host joined", "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z"),
    "stop": ("told to stop", "M-3-7H3L7-3V3L3 7H-3L-7 3V-3Z"),
    "monitor_restarted": ("monitor restarted", "M-4-4H4V4H-4Z"),
    "mismatch": ("replicas differ", "M-7-5H7V-1H-7ZM-7 1H7V5H-7Z"),
    "straggler": ("slow rank", "M-6-6H6L1 0 6 6H-6L-1 0Z"),
}
"""What the marks mean, and the paths that draw them."""

_ROW, _TOP = 24, 26  # heights in pixels
_LANES, _SPANS, _MARKS = 96, 4000, 1000  # the most elements of each sort
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_CLOCKS = (
    "Clocks of hosts are not compared: each host is placed so that it enters the function together "
    "with the others."
)


def timeline_rows(report: Report) -> dict[str, Any] | None:
    """The rows of the chart from top to bottom, and its legend; `None` without any."""
    hosts = [host for host in report.timeline if host.lanes]
    if not hosts:
        return None
    begin = min((host.shift or 0.0 for host in hosts), default=0.0)
    end = max(1e-6, max(host.end + (host.shift or 0.0) for host in hosts) - begin)
    lanes = [lane for host in hosts for lane in host.lanes]
    ranked = sorted(lanes, key=lambda lane: -sum(mark.kind == "fault" for mark in lane.marks))
    shown = {id(lane) for lane in ranked[:_LANES]}
    rows: list[dict[str, Any]] = []
    for host in hosts:
        own = [lane for lane in host.lanes if id(lane) in shown]
        for lane in [None, *own] if own else []:
            row = {
                "name": lane.name if lane else host.host,
                "lane": lane,
                "y": _TOP + _ROW * len(rows),
                "shift": (host.shift or 0.0) - begin,
                "words": _shares(lane.spans if lane else ()),
                "spans": thin_spans(lane.spans if lane else (), max(40, _SPANS // len(shown)), end),
                "marks": thin_marks(lane.marks if lane else (), max(10, _MARKS // len(shown)), end),
            }
            rows.append(row)
    left_out = len(lanes) - len(shown)
    more = f"{left_out} more lanes are not shown; those with faults come first."
    return {
        "rows": rows,
        "end": end,
        "height": _TOP + _ROW * len(rows),
        "states": [s for s in STATES if any(s == x.state for lane in lanes for x in lane.spans)],
        "marks": [k for k in MARKS if any(k == x.kind for lane in lanes for x in lane.marks)],
        "ticks": _ticks(end),
        "notes": [_CLOCKS] * (len(hosts) > 1) + [more] * (left_out > 0),
    }


def thin_spans(spans: Sequence[Span], limit: int, end: float) -> list[tuple[Span, int]]:
    """At most `limit` spans, each with the number of spans that it stands for. Long ones stay. Of
    the short ones that begin in the same cell, those of one state become one span of the same
    length, and the spans of the states stand next to each other.
    """
    if len(spans) <= limit:
        return [(span, 1) for span in spans]
    cells = max(1, limit // (1 + len({span.state for span in spans})))
    width = end / cells
    kept = [(span, 1) for span in spans if span.end - span.start > width]
    groups: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.end - span.start <= width:
            groups[min(cells - 1, int(span.start / width))][span.state].append(span)
    for states in groups.values():
        start = min(group[0].start for group in states.values())
        for state, group in states.items():
            stop = start + sum(span.end - span.start for span in group)
            kept.append((Span(state=state, start=start, end=stop), len(group)))
            start = stop
    return sorted(kept, key=lambda thin: thin[0].start)


def thin_marks(marks: Sequence[Mark], limit: int, end: float) -> list[tuple[Mark, int]]:
    """At most `limit` marks for each kind: of those in the same cell the first, and how many more
    there are.
    """
    if len(marks) <= limit:
        return [(mark, 0) for mark in marks]
    groups: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in marks:
        groups[mark.kind, int(mark.at / (end or 1.0) * (limit - 1))].append(mark)
    found = [(group[0], len(group) - 1) for group in groups.values()]
    return sorted(found, key=lambda thin: thin[0].at)


def clock(seconds: float) -> str:
    """A moment of the run: 7.25 s, 3:20, 5:12:00."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{seconds:.3g} s"


def _shares(spans: Sequence[Span]) -> str:
    """How long the lane was in each state, in words, for those who do not see the chart."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.end - span.start
    longest = sorted(seconds.items(), key=lambda each: -each[1])
    return ", ".join(f"{STATES[state]} {duration_text(time)}" for state, time in longest)


def _ticks(end: float) -> dict[float, int]:
    """The moments below the chart, and from which enlargement on each is shown."""
    found: dict[float, int] = {}
    for zoom in ZOOMS:
        step = next((s for s in _STEPS if end / s <= 9 * zoom), _STEPS[-1] * max(1, end // 864000))
        for number in range(min(400, int(0.97 * end / step) + 1)):
            found.setdefault(number * step, zoom)
    return found
