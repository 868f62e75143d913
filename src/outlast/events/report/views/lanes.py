"""The timeline as the page draws it: rows of rectangles and marks, reduced to a bounded number of
elements so that nothing rare disappears.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from outlast.events.report.model import Span
from outlast.events.report.whole import HostTimeline, Lane, Mark, Report
from outlast.events.report.words import one_line
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
SHAPES = {
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
_ROW, _TOP = 24, 26  # heights in pixels
_LANES, _SPANS, _MARKS = 96, 4000, 1000  # the most elements of each sort
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_CLOCKS = (
    "Clocks of hosts are not compared: each host is placed so that it enters the function together "
    "with the others."
)


def timeline_values(report: Report) -> dict[str, Any] | None:
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
        if own:
            rows.append({"name": host.host, "lane": None, "drawn": []})
        rows += [_row(lane, host, begin, end, len(shown)) for lane in own]
    for number, row in enumerate(rows):
        row["y"] = _TOP + _ROW * number
    used = {span.state for row in rows if row["lane"] for span in row["lane"].spans}
    marked = {mark.kind for row in rows if row["lane"] for mark in row["lane"].marks}
    left_out = len(lanes) - len(shown)
    more = f"{left_out} more lanes are not shown; those with faults come first."
    return {
        "rows": rows,
        "height": _TOP + _ROW * len(rows),
        "states": [state for state in STATES if state in used],
        "marks": [kind for kind in MARKS if kind in marked],
        "ticks": list(_ticks(end)),
        "notes": [_CLOCKS] * (len(hosts) > 1) + [more] * (left_out > 0),
    }


def _row(lane: Lane, host: HostTimeline, begin: float, end: float, lanes: int) -> dict[str, Any]:
    shift = (host.shift or 0.0) - begin
    spans = thin_spans(lane.spans, max(40, _SPANS // lanes), end)
    marks = thin_marks(lane.marks, max(10, _MARKS // lanes), end)
    return {
        "name": lane.name,
        "lane": lane,
        "label": f"{lane.name}: {_shares(lane)}",
        "rects": [
            {
                "x": _percent((span.start + shift) / end),
                "width": _percent((span.end - span.start) / end),
                "color": span.state,
                "tip": f"{lane.name}: {STATES.get(span.state, span.state)}, "
                f"{duration_text(span.end - span.start)}"
                f"{f' in {count} spans' if count > 1 else ''}, from {_clock(span.start + shift)}",
            }
            for span, count in spans
        ],
        "drawn": [
            {
                "x": _percent((mark.at + shift) / end),
                "kind": mark.kind,
                "tip": f"{lane.name}, {_clock(mark.at + shift)}: {MARKS[mark.kind]}: "
                f"{one_line(mark.text)[:300]}{f' (and {more} more here)' if more else ''}",
            }
            for mark, more in marks
        ],
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


def _shares(lane: Lane) -> str:
    """How long the lane was in each state, in words, for those who do not see the chart."""
    seconds: dict[str, float] = {}
    for span in lane.spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.end - span.start
    longest = sorted(seconds.items(), key=lambda each: -each[1])
    said = [f"{STATES.get(state, state)} {duration_text(time)}" for state, time in longest]
    return ", ".join(said) or "no states"


def _ticks(end: float) -> Iterable[dict[str, Any]]:
    done: set[float] = set()
    for zoom in ZOOMS:
        step = next((s for s in _STEPS if end / s <= 9 * zoom), _STEPS[-1] * max(1, end // 864000))
        moments = [number * step for number in range(int(end / step) + 1) if number < 400]
        for moment in moments:
            if moment not in done and moment <= 0.97 * end:
                done.add(moment)
                yield {"x": _percent(moment / end), "text": _clock(moment), "zoom": zoom}


def _clock(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{seconds:.3g} s"


def _percent(part: float) -> str:
    return f"{min(max(part, 0.0), 1.0) * 100:.3f}%"
