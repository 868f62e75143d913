"""The first causes and the hosts of the faults, ranked."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.events.report.html.elements import Markup, percent, section, table, tag
from outlast.events.report.model import Report
from outlast.events.report.totals import describe_end, describe_injected
from outlast.system.units import duration_text

_ROWS, _PLACES = 30, 4


def causes_section(report: Report) -> Markup:
    """The kinds of first causes, and the hosts on which they were."""
    content: list[Markup] = []
    if told := describe_end(report):
        content.append(tag("p", told, class_="lead"))
    if report.causes:
        most = max(cause.count for cause in report.causes)
        ranked: list[tuple[str, ...]] = [
            (
                cause.what,
                _count(cause.count, most),
                _places(cause.where),
                duration_text(cause.recovery_seconds),
                "-" if cause.redone_steps is None else f"{cause.redone_steps:,}",
            )
            for cause in report.causes[:_ROWS]
        ]
        heads = ("first cause", "restarts", "where", "recovery", "steps done again")
        content.append(table(heads, ranked, caption="First causes, by number", numbers=(3, 4)))
        content += _more(len(report.causes))
    if report.host_counts:
        most = max(host.count for host in report.host_counts)
        hosts = [
            (host.host, _count(host.count, most), _places(host.causes))
            for host in report.host_counts[:_ROWS]
        ]
        columns = ("host", "first causes", "which")
        content.append(table(columns, hosts, caption="Hosts, by number of first causes"))
        content += _more(len(report.host_counts))
    content += [tag("p", sentence) for sentence in describe_injected(report)]
    if not content:
        content.append(tag("p", "There was no fault."))
    return section("Causes and hosts", "causes", *content)


def _count(count: int, most: int) -> Markup:
    width = f"{percent(count / most * 0.7)}"
    bar = tag("rect", x=0, y=4, width=width, height=10, class_="c-hang")
    number = tag("text", f"{count:,}", x=width, y=13, dx=5)
    return tag("svg", bar, number, class_="count", width="100%", height=18, role="img",
               aria_label=str(count))  # fmt: skip


def _places(counts: Sequence[tuple[str, int]]) -> str:
    named = [f"{name} ({count})" if count > 1 else name for name, count in counts[:_PLACES]]
    more = [f"{len(counts) - _PLACES} more"] if len(counts) > _PLACES else []
    return ", ".join([*named, *more])


def _more(count: int) -> list[Markup]:
    text = f"{count - _ROWS} more are in the JSON report."
    return [tag("p", text, class_="note")] if count > _ROWS else []
