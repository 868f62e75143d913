"""The report as one HTML page, which needs nothing else: no other file, no network.

    page = render_html(build(load("build/demo")), title="build/demo")

Text from logs may contain anything: the template escapes whatever it shows. The content security
policy allows the page's own style and script, by their hashes, and nothing else: no request is
made, and markup that came from a log could not run. The number of elements is bounded, whatever the
number of events: `--json` has every fact.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from outlast.events.report.builder import BACK, distribution
from outlast.events.report.lanes import MARKS, STATES, ZOOMS, clock, timeline_rows
from outlast.events.report.model import Restart
from outlast.events.report.report import CauseCount, Report, Save
from outlast.events.report.sentences import describe, describe_goodput, headline_host
from outlast.events.report.words import (
    PARTS,
    cause_text,
    one_line,
    parts_of,
    plural,
    printable,
    share,
)
from outlast.system.units import duration_text, size_text

PHASES = {
    "hang": "no progress",
    "detection": "detection",
    "abort": "abort",
    "leave": "leaving",
    "clean_up": "clean-up",
    "replacements": "waiting for replacements",
    "entry": "re-entry",
    "restore": "restore",
}
"""The parts of a recovery, in their order."""

_BARS, _RESTARTS, _SAVES, _TRACEBACK = 40, 100, 150, 2000
_SAVE_HEIGHT = 110

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
        **{"duration": duration_text, "size": size_text, "share": _share, "percent": percent},
        **{"clock": clock, "plural": plural, "places": _places, "line": one_line},
    }
    numbered = list(enumerate(report.restarts, start=1))
    shown_restarts = _longest(numbered, _RESTARTS)
    known = [each for each in numbered if each[1].recovery is not None]
    return environment.from_string(_file("page.html.jinja")).render(
        report=report,
        title=report.command or title,
        subtitle=[text for text in (title if report.command else "", started) if text],
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        describe=describe,
        goodput=describe_goodput(report),
        host=headline_host(report),
        parts_of=parts_of,
        parts=PARTS,
        part_names={name: words for name, (words, _) in PARTS.items()},
        faults=[(count, _faults(count, dict(shown_restarts), report)) for count in report.causes],
        faults_left_out=_left_out(shown_restarts, numbered, "fault"),
        timeline=timeline_rows(report),
        states=STATES,
        marks=MARKS,
        zooms=ZOOMS,
        phases=PHASES,
        percentiles={BACK: "fault to function", **PHASES, "total": "all of it"},
        recoveries=_longest(known, _BARS),
        recoveries_left_out=_left_out(_longest(known, _BARS), known, "restart"),
        cause_text=cause_text,
        save_times=_save_times(report.saves.each if report.saves else ()),
        save_bars=_save_bars(report.saves.each if report.saves else ()),
    )


def percent(part: float) -> str:
    """A fraction as an SVG length, between 0 and 100 %."""
    return f"{min(max(part, 0.0), 1.0) * 100:.3f}%".replace(".000", "")


def _share(part: float) -> str:
    return share(part) if part >= 0.00005 else "< 0.01 %"


def _faults(count: CauseCount, shown: dict[int, Restart], report: Report) -> list[dict[str, Any]]:
    """The restarts of one cause that are shown."""
    found = []
    for number in (place + 1 for place in count.restarts if place + 1 in shown):
        restart = shown[number]
        total = restart.phases.total
        took = "" if total is None else f" · {duration_text(total)}"
        title = describe("title", number, restart, report)[0].partition(". ")[2]
        fault = {
            "name": f"{number}. {cause_text(restart)}",
            "took": took if restart.resumed else " · ended the job",
            "restart": restart,
            "sentences": " ".join([f"{title}.", *describe("restart", restart, report)]),
            "traceback": (restart.cause.traceback if restart.cause else "")[-_TRACEBACK:].strip(),
        }
        found.append(fault)
    return found


def _save_times(saves: Sequence[Save]) -> list[tuple[str, list[tuple[str, float]]]]:
    """How long saves took: the median or, of many, percentiles; and the longest."""
    done = [save for save in saves if not save.cause]
    found = []
    for label, seconds in (
        ("blocked training", [save.blocked_seconds for save in done]),
        ("until durable", [save.seconds for save in done]),
    ):
        if seconds:
            times = distribution(seconds)
            most = [("p50", times.p50), ("p99", times.p99)] if times.p99 is not None else []
            named = [*(most or [("median", times.p50)]), ("longest", times.worst)]
            found.append((label, [(name, time or 0.0) for name, time in named]))
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
                "x": percent(number / len(groups)),
                "width": percent(0.8 / len(groups)),
                "y": f"{_SAVE_HEIGHT - height:.4g}",
                "height": f"{height:.4g}",
                "color": color,
                "save": slowest,
                "of": f" of {group[0].step:,} to {group[-1].step:,}" if len(group) > 1 else "",
            }
            bars.append(bar)
    return bars


def _longest(restarts: Sequence[Numbered], limit: int) -> list[Numbered]:
    """The restarts that took longest, in their order; those that ended the job are among them."""

    def seconds(each: Numbered) -> float:
        _, restart = each
        if not restart.resumed:
            return float("inf")
        return restart.recovery.total if restart.recovery else restart.phases.total or 0.0

    longest = sorted(restarts, key=seconds, reverse=True)[:limit]
    return sorted(longest, key=lambda each: each[0])


def _left_out(shown: Sequence[Numbered], all_: Sequence[Numbered], noun: str) -> str:
    count = plural(len(all_), noun)
    text = f"The {len(shown)} longest of {count}; all are in the JSON report."
    return text if len(shown) < len(all_) else ""


def _places(counts: Iterable[tuple[str, int]]) -> str:
    named = [f"{name} ({count})" if count > 1 else name for name, count in counts]
    return ", ".join(named if len(named) <= 4 else [*named[:4], f"{len(named) - 4} more"])


def _file(name: str) -> str:
    return files("outlast.events.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
