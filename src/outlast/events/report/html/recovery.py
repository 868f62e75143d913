"""The recovery waterfall, the percentiles of its parts, and what happened at each restart."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.events.report.figures.recoveries import BACK
from outlast.events.report.html.elements import Markup, details, key, percent, section, table, tag
from outlast.events.report.html.overview import PARTS
from outlast.events.report.model import Recovery, Report, Restart
from outlast.events.report.sentences import cause_text, describe_restart, restart_title
from outlast.events.report.words import plural
from outlast.system.units import duration_text

_BARS, _RESTARTS, _TRACEBACK = 40, 100, 2000

PHASES = ("hang", "detection", "abort", "leave", "clean_up", "replacements", "entry", "restore")
"""The parts of a recovery, in their order."""

Numbered = tuple[int, Restart]


def recovery_section(report: Report) -> Markup:
    """How long the restarts took, part by part."""
    if not report.restarts:
        return section("Recovery", "recovery", tag("p", "There was no restart."))
    content = [_percentiles(report)] if report.recovery else []
    known = [(n, r) for n, r in enumerate(report.restarts, start=1) if r.recovery is not None]
    if known:
        content = [*_waterfall(known), *content]
    return section("Recovery", "recovery", *content)


def restarts_section(report: Report) -> Markup:
    """What happened, restart by restart."""
    if not report.restarts:
        return section("What happened", "restarts", tag("p", "No fault, and no restart."))
    numbered = _longest(list(enumerate(report.restarts, start=1)), _RESTARTS)
    told = [_restart(number, restart, report) for number, restart in numbered]
    if len(numbered) < len(report.restarts):
        told.append(_left_out(len(numbered), len(report.restarts)))
    return section("What happened", "restarts", *told)


def phase_name(name: str) -> str:
    """The part of a recovery as the page calls it."""
    return "restore" if name == "restore" else PARTS[name][0]


def _waterfall(known: Sequence[Numbered]) -> list[Markup]:
    shown = _longest(known, _BARS)
    worst = max(r.recovery.total for _, r in shown if r.recovery is not None) or 1.0
    used = [p for p in PHASES if any(getattr(r.recovery, p) > 0 for _, r in shown)]
    legend = key([(_color(phase), phase_name(phase)) for phase in used], label="Phases")
    rows = []
    values = []
    for number, restart in shown:
        if restart.recovery is None:
            continue
        name = f"{number}. {cause_text(restart)}"
        total = duration_text(restart.recovery.total)
        rows += [
            tag("div", name, class_="name", title=name),
            _bar(restart.recovery, worst, name),
            tag("div", total, class_="n"),
        ]
        seconds = [getattr(restart.recovery, phase) for phase in used]
        cells = [duration_text(each) if each else "-" for each in seconds]
        values.append((name, restart.recovery.host, *cells, total))
    heads = ("restart", "host", *(phase_name(phase) for phase in used), "total")
    numbers = range(2, len(heads))
    written = table(heads, values, caption="The recovery of each restart", numbers=numbers)
    found = [
        tag(
            "p",
            "From the last progress before a fault to the end of the restore, on the host of the "
            "fault. The parts follow each other: each ends when the last rank of the host has "
            "finished it.",
            class_="note",
        ),
        legend,
        tag("div", *rows, class_="waterfall"),
    ]
    if len(shown) < len(known):
        found.append(_left_out(len(shown), len(known)))
    return [*found, details("As a table", written)]


def _bar(recovery: Recovery, worst: float, name: str) -> Markup:
    drawn, x = [], 0.0
    for phase in PHASES:
        seconds = getattr(recovery, phase)
        if seconds > 0:
            drawn.append(
                tag(
                    "rect",
                    x=percent(x / worst),
                    y=3,
                    width=percent(seconds / worst),
                    height=14,
                    class_=f"c-{_color(phase)}",
                    data_tip=f"{name}: {phase_name(phase)} {duration_text(seconds)}",
                )
            )
        x += seconds
    said = ", ".join(
        f"{phase_name(p)} {duration_text(getattr(recovery, p))}"
        for p in PHASES
        if getattr(recovery, p) > 0
    )
    return tag("svg", *drawn, width="100%", height=20, role="img", aria_label=f"{name}: {said}")


def _percentiles(report: Report) -> Markup:
    names = {BACK: "fault to function", **{phase: phase_name(phase) for phase in PHASES}}
    names["total"] = "all of it"
    rows = []
    for name, label in names.items():
        found = report.recovery.get(name)
        if found is not None:
            times = (found.p50, found.p99, found.worst)
            rows.append(
                (label, str(found.count), *(duration_text(each) if each else "-" for each in times))
            )
    caption = "Percentiles over the restarts; each is a measured value"
    return table(
        ("part", "restarts", "p50", "p99", "longest"), rows, caption=caption, numbers=(1, 2, 3, 4)
    )


def _restart(number: int, restart: Restart, report: Report) -> Markup:
    total = restart.phases.total
    took = "ended the job" if not restart.resumed else "" if total is None else duration_text(total)
    sizes = f"{restart.world_size_before} → {restart.world_size_after or '-'} ranks"
    summary = tag(
        "summary",
        tag("b", f"{number}. {cause_text(restart)}"),
        tag("span", f"at {duration_text(restart.at)} · {sizes} · {took}", class_="note"),
    )
    content = [tag("p", sentence) for sentence in describe_restart(restart, report)]
    title = restart_title(number, restart, report)
    if restart.cause is not None and restart.cause.traceback:
        content.append(tag("pre", restart.cause.traceback[-_TRACEBACK:].strip(), tabindex=0))
    return tag("details", summary, tag("p", title, class_="note"), *content)


def _longest(restarts: Sequence[Numbered], limit: int) -> list[Numbered]:
    """The restarts that took longest, in their order; those that ended the job are among them."""

    def seconds(each: Numbered) -> float:
        _, restart = each
        if not restart.resumed:
            return float("inf")
        if restart.recovery is not None:
            return restart.recovery.total
        return restart.phases.total or 0.0

    longest = sorted(restarts, key=seconds, reverse=True)[:limit]
    return sorted(longest, key=lambda each: each[0])


def _left_out(shown: int, all_: int) -> Markup:
    text = f"The {shown} longest of {plural(all_, 'restart')}; all are in the JSON report."
    return tag("p", text, class_="note")


def _color(phase: str) -> str:
    return "setup" if phase == "restore" else phase
