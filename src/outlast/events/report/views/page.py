"""The report as one HTML page, which needs nothing else: no other file, no network.

    page = render_html(build(load("build/demo")), title="build/demo")

The template is filled with plain values that are escaped where they are shown, since text from logs
may contain anything. The content security policy allows the page's own style and script, by their
hashes, and nothing else: no request is made, and markup that came from a log could not run. The
number of elements is bounded, whatever the number of events: `--json` has every fact.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from outlast.events.report.builder import BACK, distribution
from outlast.events.report.figures.causes import cause_text
from outlast.events.report.model import HostTime, Restart
from outlast.events.report.views.lanes import MARKS, SHAPES, STATES, ZOOMS, timeline_values
from outlast.events.report.views.sentences import describe_restart, restart_title
from outlast.events.report.views.totals import (
    describe_end,
    describe_goodput,
    describe_injected,
    describe_recovery,
    describe_saves,
    ending,
    headline_host,
)
from outlast.events.report.whole import Report, Save, Saves
from outlast.events.report.words import PARTS, one_line, parts_of, plural, printable, share
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

_BARS, _RESTARTS, _GROUPS, _HOSTS, _SAVES, _ROWS, _TRACEBACK = 40, 100, 30, 100, 150, 30, 2000
_SAVE_HEIGHT = 110

Numbered = tuple[int, Restart]
Values = dict[str, Any]


def render_html(report: Report, *, title: str = "", started: str = "") -> str:
    """The page, as the text of an HTML file in UTF-8.

    Args:
        title: the name of the run; the title is the script with its arguments, if they are known.
        started: when the run started, in words.
    """
    import jinja2
    from markupsafe import Markup

    def shown(value: object) -> object:
        return printable(value) if isinstance(value, str) and type(value) is str else value

    style, script = Markup(_file("style.css")), Markup(_file("script.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = [title or report.run_id] if report.command else []
    told = [name for name in (*names, started) if name]
    page = environment.from_string(_file("page.html.jinja")).render(
        title=report.command or title,
        subtitle=" · ".join(told),
        facts=_facts(report),
        style=style,
        script=script,
        policy=policy,
        parts=PARTS,
        phases=PHASES,
        states=STATES,
        marks=MARKS,
        shapes=SHAPES,
        zooms=ZOOMS,
        end_words=describe_end(report),
        injected=describe_injected(report),
        **_faults(report),
        goodput=_goodput(report),
        timeline=timeline_values(report),
        recovery_words=describe_recovery(report),
        recovery=_recovery(report),
        saves=None if report.saves is None else _saves(report.saves),
        ending=ending(report, saves=False),
    )
    return f"{page}\n"


def percent(part: float) -> str:
    """A fraction as an SVG length, between 0 and 100 %."""
    return f"{min(max(part, 0.0), 1.0) * 100:.3f}%".replace(".000", "")


def _facts(report: Report) -> list[str]:
    facts = [plural(report.world_size, "rank"), plural(len(report.hosts), "host")]
    facts.append(plural(len(report.restarts), "restart"))
    if report.lost:
        facts.append(f"{plural(report.lost, 'rank')} lost, {report.replaced} replaced")
    if report.hosts_lost:
        facts.append(f"{plural(len(report.hosts_lost), 'host')} lost")
    return [*facts, f"{report.events:,} events"]


def _faults(report: Report) -> Values:
    """The restarts, grouped by their first cause."""
    shown = dict(_longest(list(enumerate(report.restarts)), _RESTARTS))
    groups = []
    for count in report.causes[:_GROUPS]:
        about = [_places(count.where)] if count.where else []
        about.append(f"recovery {duration_text(count.recovery_seconds)}")
        if count.redone_steps:
            about.append(f"{plural(count.redone_steps, 'step')} done again")
        own = [_fault(n, shown[n], report) for n in count.restarts if n in shown]
        groups.append({"count": count, "about": " · ".join(about), "restarts": own})
    hosts = [
        (host.host, _places(host.causes), f"{host.count:,}") for host in report.host_counts[:_ROWS]
    ]
    return {
        "faults": groups,
        "faults_left_out": _left_out(len(shown), len(report.restarts)),
        "fault_hosts": hosts if len(report.hosts) > 1 else [],
    }


def _fault(number: int, restart: Restart, report: Report) -> Values:
    total = restart.phases.total
    took = "ended the job" if not restart.resumed else "" if total is None else duration_text(total)
    sizes = f"{restart.world_size_before} → {restart.world_size_after or '-'} ranks"
    title = restart_title(number + 1, restart, report).partition(". ")[2]
    about = [f"at {duration_text(restart.at)}", sizes, *filter(None, [took])]
    return {
        "name": f"{number + 1}. {cause_text(restart)}",
        "about": " · ".join(about),
        "sentences": " ".join([f"{title}.", *describe_restart(restart, report)]),
        "traceback": "" if restart.cause is None else restart.cause.traceback[-_TRACEBACK:].strip(),
    }


def _goodput(report: Report) -> Values | None:
    """The goodput of the run, and what each host used its wall time for."""
    host = headline_host(report)
    if host is None or host.goodput is None:
        return None
    wall = host.wall_seconds
    inside = {
        PHASES[name]: getattr(host.lost.restart_parts, name)
        for name in ("detection", "abort", "leave", "clean_up", "entry")
    }
    rows = []
    for name, seconds in parts_of(host).items():
        if seconds > 0:
            rows.append(_row(PARTS[name][0], seconds, wall, PARTS[name][1], name))
        if name == "restarts" and seconds > 0:
            rows += [_row(f"· {phase}", s, wall, "") for phase, s in inside.items() if s > 0]
    rows.append(_row("total", wall, wall, "from the first entry to the end"))
    where = f" on {host.host}" if len(report.hosts) > 1 else ""
    several = [each for each in report.hosts if each.wall_seconds > 0 and len(report.hosts) > 1]
    more = len(several) - _HOSTS
    return {
        "share": share(host.goodput),
        "words": describe_goodput(report),
        "start": duration_text(host.start_seconds) if host.start_seconds else "",
        "bar": _time_bar(host, "Where the wall time went", 30),
        "caption": f"Where the wall time{where} went",
        "rows": rows,
        "hosts": [
            {
                "name": each.host,
                "about": f"{share(each.goodput or 0)} of {duration_text(each.wall_seconds)}",
                "bar": _time_bar(each, f"Time on {each.host}", 14),
            }
            for each in several[:_HOSTS]
        ],
        "hosts_left_out": f"{more} more hosts are in the JSON report." if more > 0 else "",
    }


def _row(name: str, seconds: float, wall: float, meaning: str, color: str = "") -> Values:
    part = share(seconds / wall) if seconds >= 0.00005 * wall else "< 0.01 %"
    time = duration_text(seconds)
    return {"name": name, "time": time, "share": part, "meaning": meaning, "color": color}


def _time_bar(host: HostTime, label: str, height: int) -> Values:
    names = {name: words for name, (words, _) in PARTS.items()}
    return _bar(parts_of(host), names, host.wall_seconds, host.wall_seconds, label, height)


def _bar(
    parts: Mapping[str, float],
    names: Mapping[str, str],
    whole: float,
    longest: float,
    label: str,
    height: int,
) -> Values:
    """A bar of parts one after another; as long as the page is wide for `longest`."""
    rects, said, x = [], [], 0.0
    for name, seconds in parts.items():
        if seconds > 0:
            text = f"{names[name]} {duration_text(seconds)}"
            said.append(text)
            tip = f"{label}: {text}, {share(seconds / whole)}"
            rects.append(_rect(x / longest, seconds / longest, name, tip, height=height))
        x += seconds
    return {"kind": "bar", "height": height, "label": f"{label}: {', '.join(said)}", "rects": rects}


def _rect(x: float, width: float, color: str, tip: str, y: float = 0, height: float = 0) -> Values:
    where = {"x": percent(x), "width": percent(width), "y": f"{y:.4g}", "height": f"{height:.4g}"}
    return {**where, "color": color, "tip": tip}


def _recovery(report: Report) -> Values | None:
    """How long the restarts took, part by part."""
    known = [(n, r) for n, r in enumerate(report.restarts, start=1) if r.recovery is not None]
    if not known:
        return None
    shown = [(n, r, r.recovery) for n, r in _longest(known, _BARS) if r.recovery is not None]
    worst = max(recovery.total for _, _, recovery in shown) or 1.0
    used = [name for name in PHASES if any(getattr(r, name) > 0 for _, _, r in shown)]
    bars, rows = [], []
    for number, restart, recovery in shown:
        name, total = f"{number}. {cause_text(restart)}", duration_text(recovery.total)
        parts = {phase: getattr(recovery, phase) for phase in used}
        chart = _bar(parts, PHASES, recovery.total or 1.0, worst, name, 18)
        bars.append({"name": name, "total": total, "chart": chart})
        rows.append((name, recovery.host, *map(_time, parts.values()), total))
    labels = {BACK: "fault to function", **PHASES, "total": "all of it"}
    percentiles = [
        (label, str(found.count), _time(found.p50), _time(found.p99), _time(found.worst))
        for name, label in labels.items()
        if (found := report.recovery.get(name)) is not None and found.p99 is not None
    ]
    return {
        "phases": used,
        "bars": bars,
        "left_out": _left_out(len(shown), len(known)),
        "heads": ("restart", "host", *(PHASES[name] for name in used), "total"),
        "rows": rows,
        "percentiles": percentiles,
    }


def _saves(saves: Saves) -> Values:
    done = [save for save in saves.each if not save.cause]
    times: list[tuple[str, ...]] = []
    heads: tuple[str, ...] = ("of a save", "median", "longest")
    for label, values in (
        ("blocked training", [save.blocked_seconds for save in done]),
        ("until durable", [save.seconds for save in done]),
    ):
        found = distribution(values) if values else None
        if found is not None and found.p99 is not None:
            heads = ("of a save", "p50", "p99", "longest")
            times.append((label, *map(_time, (found.p50, found.p99, found.worst))))
        elif found is not None:
            times.append((label, _time(found.p50), _time(found.worst)))
    removed = f", {saves.removed:,} removed" if saves.removed else ""
    bad = [("not committed", *each) for each in saves.failed[-_ROWS:]]
    bad += [("passed over", *each) for each in saves.passed_over[-_ROWS:]]
    return {
        "words": describe_saves(saves),
        "chart": _save_chart(saves.each) if done else None,
        "worst": duration_text(max((save.seconds for save in saves.each), default=0.0)),
        "caption": f"{saves.committed:,} committed, {size_text(saves.size_bytes)} each{removed}",
        "heads": heads,
        "times": times,
        "restores": [
            (r.source, r.host, duration_text(r.at), f"{r.step:,}", duration_text(r.seconds))
            for r in saves.restores[-_ROWS:]
        ],
        "bad": [(what, cause, f"{step:,}") for what, step, cause in bad],
    }


def _save_chart(saves: Sequence[Save]) -> Values:
    """A bar for each save, or for the slowest of neighbors where there are many."""
    size = max(1, -(-len(saves) // _SAVES))
    groups = [saves[start : start + size] for start in range(0, len(saves), size)]
    worst = max(save.seconds for save in saves) or 1.0
    rects = []
    for number, group in enumerate(groups):
        slowest = max(group, key=lambda save: (bool(save.cause), save.seconds))
        several = f"to step {group[-1].step:,}, slowest " if len(group) > 1 else ""
        tip = (
            f"step {group[0].step:,} {several}durable after {duration_text(slowest.seconds)}, "
            f"blocked training for {duration_text(slowest.blocked_seconds)}"
        )
        if slowest.cause:
            tip = f"step {slowest.step:,} failed: {slowest.cause[:200]}"
        tall = max(1.0, slowest.seconds / worst * _SAVE_HEIGHT)
        block = min(tall, max(1.0, slowest.blocked_seconds / worst * _SAVE_HEIGHT))
        for height, color in ((tall, "hang" if slowest.cause else "saving"), (block, "saves")):
            x, width = number / len(groups), 0.8 / len(groups)
            rects.append(_rect(x, width, color, tip, _SAVE_HEIGHT - height, height))
    label = f"Duration of each save, at most {duration_text(worst)}"
    return {"kind": "saves", "height": _SAVE_HEIGHT, "label": label, "rects": rects}


def _longest(restarts: Sequence[Numbered], limit: int) -> list[Numbered]:
    """The restarts that took longest, in their order; those that ended the job are among them."""

    def seconds(each: Numbered) -> float:
        _, restart = each
        if not restart.resumed:
            return float("inf")
        return restart.recovery.total if restart.recovery else restart.phases.total or 0.0

    longest = sorted(restarts, key=seconds, reverse=True)[:limit]
    return sorted(longest, key=lambda each: each[0])


def _left_out(shown: int, all_: int) -> str:
    text = f"The {shown} longest of {plural(all_, 'restart')}; all are in the JSON report."
    return text if shown < all_ else ""


def _places(counts: Iterable[tuple[str, int]]) -> str:
    named = [
        f"{one_line(name)} ({count})" if count > 1 else one_line(name) for name, count in counts
    ]
    return ", ".join(named if len(named) <= 4 else [*named[:4], f"{len(named) - 4} more"])


def _time(seconds: float | None) -> str:
    return duration_text(seconds) if seconds else "-"


def _file(name: str) -> str:
    return files("outlast.events.report.views").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
