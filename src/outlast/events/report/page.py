"""The report as one HTML page, which needs nothing else: no other file, no network.

    page = render_html(build(load("build/demo")), title="build/demo")

Text from logs may contain anything: the template escapes whatever it shows. The content security
policy allows the page's own style and script, by their hashes, and nothing else: no request is
made, and markup that came from a log could not run. The number of elements is bounded, whatever the
number of events, so that nothing rare disappears: `--json` has every fact.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from outlast.events.report import sentences
from outlast.events.report.builder import distribution
from outlast.events.report.model import Restart, Span
from outlast.events.report.report import CauseCount, Lane, Mark, Report, Save
from outlast.events.report.sentences import PARTS, describe, plural, printable
from outlast.system.units import duration_text, size_text

_BARS, _RESTARTS, _SAVES, _TRACEBACK = 40, 100, 150, 2000
_LANES, _SPANS, _MARKS = 96, 4000, 1000  # the most elements of each sort
_SAVE_HEIGHT, _ROW, _TOP = 110, 24, 26  # in pixels
_ZOOMS = (1, 4, 16)
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

Numbered = tuple[int, Restart]


def render_html(report: Report, *, title: str = "", started: str = "") -> str:
    """The page, as the text of an HTML file in UTF-8.

    Args:
        title: the name of the run; the title is the script with its arguments, if they are known.
        started: when the run started, in words.
    """
    import jinja2
    from markupsafe import Markup

    def shown(value: object) -> object:
        return printable(value) if type(value) is str else value

    style, script = Markup(_file("style.css")), Markup(_file("script.js"))
    environment = jinja2.Environment(
        autoescape=True, finalize=shown, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "duration": duration_text, "size": size_text, "share": _share, "percent": _percent,
        "clock": _clock, "plural": plural, "places": _places, "line": sentences.one_line,
    }  # fmt: skip
    numbered = list(enumerate(report.restarts, start=1))
    shown_restarts = _longest(numbered, _RESTARTS)
    known = [each for each in numbered if each[1].recovery is not None]
    saves = report.saves.each if report.saves else ()
    return environment.from_string(_file("page.html.jinja")).render(
        report=report,
        title=report.command or title,
        subtitle=[text for text in (title if report.command else "", started) if text],
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        describe=describe,
        goodput=sentences.describe_goodput(report),
        host=sentences.headline_host(report),
        parts_of=sentences.parts_of,
        parts=PARTS,
        part_names={name: words for name, (words, _) in PARTS.items()},
        faults=[(count, _faults(count, dict(shown_restarts), report)) for count in report.causes],
        faults_left_out=_left_out(shown_restarts, numbered, "fault"),
        timeline=_timeline(report),
        zooms=_ZOOMS,
        recoveries=_longest(known, _BARS),
        recoveries_left_out=_left_out(_longest(known, _BARS), known, "restart"),
        cause_text=sentences.cause_text,
        save_times=_save_times([save for save in saves if not save.cause]),
        save_bars=_save_bars(saves),
    )


def _faults(count: CauseCount, shown: dict[int, Restart], report: Report) -> list[dict[str, Any]]:
    """The restarts of one cause that are shown."""
    found = []
    for number in (place + 1 for place in count.restarts if place + 1 in shown):
        restart = shown[number]
        total = restart.phases.total
        took = "" if total is None else f" · {duration_text(total)}"
        (title,) = describe("title", number, restart, report)
        told = [f"{title.partition('. ')[2]}.", *describe("restart", restart, report)]
        fault = {
            "name": f"{number}. {sentences.cause_text(restart)}",
            "took": took if restart.resumed else " · ended the job",
            "restart": restart,
            "sentences": " ".join(told),
            "traceback": (restart.cause.traceback if restart.cause else "")[-_TRACEBACK:].strip(),
        }
        found.append(fault)
    return found


def _longest(restarts: Sequence[Numbered], limit: int) -> list[Numbered]:
    """The restarts that took longest, in their order; those that ended the job are among them."""

    def seconds(each: Numbered) -> float:
        _, restart = each
        if not restart.resumed:
            return float("inf")
        return restart.recovery.total if restart.recovery else restart.phases.total or 0.0

    return sorted(sorted(restarts, key=seconds, reverse=True)[:limit], key=lambda each: each[0])


def _left_out(shown: Sequence[Numbered], all_: Sequence[Numbered], noun: str) -> str:
    count = plural(len(all_), noun)
    text = f"The {len(shown)} longest of {count}; all are in the JSON report."
    return text if len(shown) < len(all_) else ""


def _save_times(done: Sequence[Save]) -> list[tuple[str, list[tuple[str, float]]]]:
    """How long saves took: the median or, of many, percentiles; and the longest."""
    found = []
    for label, name in (("blocked training", "blocked_seconds"), ("until durable", "seconds")):
        if done:
            times = distribution([getattr(save, name) for save in done])
            median = [("median", times.p50)]
            most = median if times.p99 is None else [("p50", times.p50), ("p99", times.p99)]
            found.append((label, [*most, ("longest", times.worst)]))
    return found


def _save_bars(saves: Sequence[Save]) -> list[dict[str, Any]]:
    """A bar for each save, or for the slowest of neighbors where there are many."""
    size = max(1, -(-len(saves) // _SAVES))
    groups = [saves[start : start + size] for start in range(0, len(saves), size)]
    worst = max((save.seconds for save in saves), default=0.0) or 1.0
    bars = []
    for number, group in enumerate(groups):
        slowest = max(group, key=lambda save: (bool(save.cause), save.seconds))
        tall = max(1.0, slowest.seconds / worst * _SAVE_HEIGHT)
        block = min(tall, max(1.0, slowest.blocked_seconds / worst * _SAVE_HEIGHT))
        for height, color in ((tall, "hang" if slowest.cause else "saving"), (block, "saves")):
            bar = {
                "x": _percent(number / len(groups)),
                "width": _percent(0.8 / len(groups)),
                "y": f"{_SAVE_HEIGHT - height:.4g}",
                "height": f"{height:.4g}",
                "color": color,
                "save": slowest,
                "of": f" of {group[0].step:,} to {group[-1].step:,}" if len(group) > 1 else "",
            }
            bars.append(bar)
    return bars


def _timeline(report: Report) -> dict[str, Any] | None:
    """The rows of the chart from top to bottom, and what its legend needs; `None` without any."""
    hosts = [host for host in report.timeline if host.lanes]
    if not hosts:
        return None
    begin = min(host.shift or 0.0 for host in hosts)
    end = max(1e-6, max(host.end + (host.shift or 0.0) for host in hosts) - begin)
    lanes = [lane for host in hosts for lane in host.lanes]
    ranked = sorted(lanes, key=lambda lane: -sum(mark.kind == "fault" for mark in lane.marks))
    shown = {id(lane) for lane in ranked[:_LANES]}
    rows: list[dict[str, Any]] = []
    for host in hosts:
        own = [lane for lane in host.lanes if id(lane) in shown]
        heading = Lane(name=host.host, rank=-1, spans=())
        for lane in [heading, *own] if own else []:
            row = {
                "name": lane.name,
                "lane": lane is not heading,
                "y": _TOP + _ROW * len(rows),
                "shift": (host.shift or 0.0) - begin,
                "states": _seconds(lane.spans),
                "spans": thin_spans(lane.spans, max(40, _SPANS // len(shown)), end),
                "marks": thin_marks(lane.marks, max(10, _MARKS // len(shown)), end),
            }
            rows.append(row)
    return {
        "rows": rows,
        "end": end,
        "height": _TOP + _ROW * len(rows),
        "states": {span.state for lane in lanes for span in lane.spans},
        "marks": {mark.kind for lane in lanes for mark in lane.marks},
        "ticks": _ticks(end),
        "hosts": len(hosts),
        "left_out": len(lanes) - len(shown),
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
    """At most `limit` marks of each kind: the first of each cell, and how many more there are."""
    if len(marks) <= limit:
        return [(mark, 0) for mark in marks]
    groups: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in marks:
        groups[mark.kind, int(mark.at / (end or 1.0) * (limit - 1))].append(mark)
    found = [(group[0], len(group) - 1) for group in groups.values()]
    return sorted(found, key=lambda thin: thin[0].at)


def _seconds(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """How long the lane was in each state, the longest first."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.end - span.start
    return sorted(seconds.items(), key=lambda each: -each[1])


def _ticks(end: float) -> dict[float, int]:
    """The moments below the chart, and from which enlargement on each is shown."""
    found: dict[float, int] = {}
    for zoom in _ZOOMS:
        step = next((s for s in _STEPS if end / s <= 9 * zoom), _STEPS[-1] * max(1, end // 864000))
        for number in range(min(400, int(0.97 * end / step) + 1)):
            found.setdefault(number * step, zoom)
    return found


def _clock(seconds: float) -> str:
    """A moment of the run: 7.25 s, 3:20, 5:12:00."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{seconds:.3g} s"


def _percent(part: float) -> str:
    """A fraction as an SVG length, between 0 and 100 %."""
    return f"{min(max(part, 0.0), 1.0) * 100:.3f}%".replace(".000", "")


def _share(part: float) -> str:
    return sentences.share(part) if part >= 0.00005 else "< 0.01 %"


def _places(counts: Iterable[tuple[str, int]]) -> str:
    named = [f"{name} ({count})" if count > 1 else name for name, count in counts]
    return ", ".join(named if len(named) <= 4 else [*named[:4], f"{len(named) - 4} more"])


def _file(name: str) -> str:
    return files("outlast.events.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
