"""The checkpoints: how long saves took and blocked training, what was restored, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.events.report.figures.recoveries import distribution
from outlast.events.report.html.elements import Markup, percent, section, table, tag
from outlast.events.report.model import Save, Saves
from outlast.events.report.sentences import describe_saves
from outlast.system.units import duration_text, size_text

_BARS, _ROWS, _HEIGHT = 150, 30, 110


def checkpoints_section(saves: Saves | None) -> Markup:
    """The section; says so if there were no checkpoints."""
    if saves is None:
        return section("Checkpoints", "checkpoints", tag("p", "The events have no checkpoints."))
    content = [tag("p", sentence) for sentence in describe_saves(saves)]
    done = [save for save in saves.each if not save.cause]
    if done:
        content = [_figures(saves, done), *_chart(saves.each), *content]
    if saves.restores:
        rows = [
            (duration_text(r.at), f"{r.step:,}", r.source, duration_text(r.seconds), r.host)
            for r in saves.restores[-_ROWS:]
        ]
        heads = ("at", "step", "from", "took", "host")
        content.append(
            table(heads, rows, caption=_last("Restores", saves.restores), numbers=(0, 1, 3))
        )
    bad = [*saves.failed, *saves.passed_over]
    if bad:
        rows_ = [
            *((f"{step:,}", "not committed", cause) for step, cause in saves.failed[-_ROWS:]),
            *((f"{step:,}", "passed over", cause) for step, cause in saves.passed_over[-_ROWS:]),
        ]
        heads_ = ("step", "what", "cause")
        content.append(
            table(heads_, rows_, caption="Failed saves and damaged checkpoints", numbers=(0,))
        )
    return section("Checkpoints", "checkpoints", *content)


def _figures(saves: Saves, done: Sequence[Save]) -> Markup:
    blocked = distribution([save.blocked_seconds for save in done])
    durable = distribution([save.seconds for save in done])
    rows = [
        (
            "blocked training",
            *(duration_text(v) for v in (blocked.p50, blocked.p99, blocked.worst)),
        ),
        ("until durable", *(duration_text(v) for v in (durable.p50, durable.p99, durable.worst))),
    ]
    removed = f", {saves.removed:,} removed" if saves.removed else ""
    caption = f"{saves.committed:,} committed, {size_text(saves.size_bytes)} each{removed}"
    return table(("of a save", "p50", "p99", "longest"), rows, caption=caption, numbers=(1, 2, 3))


def _chart(saves: Sequence[Save]) -> list[Markup]:
    """A bar for each save, or for the slowest of neighbors where there are many."""
    size = max(1, -(-len(saves) // _BARS))
    groups = [saves[start : start + size] for start in range(0, len(saves), size)]
    worst = max(save.seconds for save in saves) or 1.0
    drawn = []
    for number, group in enumerate(groups):
        slowest = max(group, key=lambda save: (bool(save.cause), save.seconds))
        steps = f"step {group[0].step:,}"
        if len(group) > 1:
            steps += f" to {group[-1].step:,}, slowest {slowest.step:,}"
        tip = (
            f"{steps}: durable after {duration_text(slowest.seconds)}, "
            f"blocked training for {duration_text(slowest.blocked_seconds)}"
        )
        if slowest.cause:
            tip = f"step {slowest.step:,} failed: {slowest.cause[:200]}"
        x, width = percent(number / len(groups)), percent(0.8 / len(groups))
        tall = max(1.0, slowest.seconds / worst * _HEIGHT)
        block = min(tall, max(1.0, slowest.blocked_seconds / worst * _HEIGHT))
        color = "c-hang" if slowest.cause else "c-saving"
        for height, kind in ((tall, color), (block, "c-saves")):
            drawn.append(
                tag(
                    "rect",
                    x=x,
                    y=f"{_HEIGHT - height:.1f}",
                    width=width,
                    height=f"{height:.1f}",
                    class_=kind,
                    data_tip=tip,
                )
            )
    label = f"Duration of each save, at most {duration_text(worst)}"
    chart = tag(
        "svg", *drawn, width="100%", height=_HEIGHT, role="img", aria_label=label, class_="saves"
    )
    legend = tag(
        "ul",
        tag("li", tag("i", class_="c-saving"), f"until durable (tallest {duration_text(worst)})"),
        tag("li", tag("i", class_="c-saves"), "of it, training was blocked"),
        class_="key",
    )
    return [legend, chart]


def _last(name: str, rows: Sequence[object]) -> str:
    return name if len(rows) <= _ROWS else f"{name}: the last {_ROWS} of {len(rows):,}"
