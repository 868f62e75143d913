"""The head of the page, and where the wall time went."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.events.report.html.elements import Markup, details, percent, section, table, tag
from outlast.events.report.model import HostTime, Report, RestartParts
from outlast.events.report.totals import describe_goodput, headline_host
from outlast.events.report.words import plural, share
from outlast.system.units import duration_text

PARTS = {
    "productive": ("productive", "training advanced"),
    "detection": ("detection", "from a fault until all ranks knew of it"),
    "abort": ("abort", "in-flight collectives were aborted"),
    "leave": ("leaving", "until the last rank had left the function, or was terminated"),
    "clean_up": ("clean-up", "finalize and health check, on all ranks"),
    "replacements": ("waiting for replacements", "the restart waited for new processes"),
    "entry": ("re-entry", "rank assignment, barriers, initialize, until all ranks trained again"),
    "uneven": ("uneven start and end", "ranks entered or left the function at different times"),
    "hang": ("no progress", "hangs and lost hosts, until they were detected"),
    "setup": ("set-up and restore", "from the entry into the function to the end of the restore"),
    "saves": ("blocked by saves", "training waited for `save`"),
    "redone": ("steps done again", "a later restore discarded their result"),
    "reduced": ("missing ranks", "the share of ranks that the job lacked"),
}
"""The parts of the wall time, in the order of the chart: name and meaning."""

_HOSTS = 200


def head(report: Report, title: str, started: str) -> Markup:
    """The title, and the run in a few numbers."""
    facts = [plural(report.world_size, "rank"), plural(len(report.hosts), "host")]
    facts.append(plural(len(report.restarts), "restart"))
    if report.lost:
        facts.append(f"{plural(report.lost, 'rank')} lost, {report.replaced} replaced")
    if report.hosts_lost:
        facts.append(f"{plural(len(report.hosts_lost), 'host')} lost")
    facts.append(f"{report.events:,} events")
    chips = tag("ul", *(tag("li", fact) for fact in facts), class_="chips")
    brand = tag("p", "outlast report", class_="brand")
    when = [tag("p", started, class_="note")] if started else []
    return tag("header", brand, tag("h1", title), *when, chips)


def goodput_section(report: Report) -> Markup:
    """The goodput of the run, and what each host used its wall time for."""
    host = headline_host(report)
    if host is None or host.goodput is None:
        return section("Goodput", "goodput", tag("p", "The events do not say when ranks trained."))
    parts = parts_of(host)
    number = tag("div", share(host.goodput), tag("small", "goodput"), class_="big")
    bar = _bar(parts, host.wall_seconds, "Where the wall time went")
    rows: list[tuple[str, ...]] = [
        (
            Markup(tag("i", class_=f"c-{name}") + tag("span", PARTS[name][0])),
            PARTS[name][1].replace("`", ""),
            duration_text(seconds),
            _share(seconds / host.wall_seconds),
        )
        for name, seconds in parts.items()
        if seconds > 0
    ]
    rows.append(
        ("total", "from the first entry to the end", duration_text(host.wall_seconds), "100 %")
    )
    where = f" on {host.host}" if len(report.hosts) > 1 else ""
    caption = f"Where the wall time{where} went"
    told = [tag("p", describe_goodput(report), class_="lead")]
    if host.start_seconds:
        told.append(
            tag(
                "p",
                f"Before it, the processes took {duration_text(host.start_seconds)} to start.",
                class_="note",
            )
        )
    split = tag("div", number, tag("div", *told), class_="headline")
    heads = ("part", "meaning", "time", "share")
    content = [split, bar, table(heads, rows, caption=caption, numbers=(2, 3))]
    if len(report.hosts) > 1:
        content.append(_hosts(report))
    return section("Goodput", "goodput", *content)


def parts_of(host: HostTime) -> dict[str, float]:
    """The wall time of a host by `PARTS`, which add up to it."""
    lost, restart = host.lost, host.lost.restart_parts
    known: Mapping[str, float] = {
        **{name: getattr(restart, name) for name in RestartParts.__dataclass_fields__},
        **{name: getattr(lost, name) for name in ("hang", "setup", "saves", "redone", "reduced")},
        "productive": host.productive_seconds,
    }
    return {name: known[name] for name in PARTS}


def _share(part: float) -> str:
    return share(part) if part >= 0.00005 else "< 0.01 %"


def _hosts(report: Report) -> Markup:
    rows = []
    for host in report.hosts[:_HOSTS]:
        if host.wall_seconds > 0:
            bar = _bar(parts_of(host), host.wall_seconds, f"Time on {host.host}", height=14)
            goodput = share(host.productive_seconds / host.wall_seconds)
            rows.append((host.host, bar, duration_text(host.wall_seconds), goodput))
    heads = ("host", "where the time went", "wall time", "goodput")
    shown = table(heads, rows, caption="Each host by its own clock", numbers=(2, 3))
    if len(report.hosts) > _HOSTS:
        more = f"{len(report.hosts) - _HOSTS} more hosts are in the JSON report."
        return details("By host", shown, tag("p", more, class_="note"))
    return details("By host", shown)


def _bar(parts: Mapping[str, float], total: float, label: str, height: int = 30) -> Markup:
    drawn, x = [], 0.0
    for name, seconds in parts.items():
        if seconds > 0:
            tip = f"{PARTS[name][0]}: {duration_text(seconds)}, {share(seconds / total)}"
            drawn.append(
                tag(
                    "rect",
                    x=percent(x / total),
                    y=0,
                    width=percent(seconds / total),
                    height=height,
                    class_=f"c-{name}",
                    data_tip=tip,
                )
            )
        x += seconds
    said = ", ".join(
        f"{PARTS[name][0]} {share(seconds / total)}"
        for name, seconds in parts.items()
        if seconds > 0
    )
    return tag(
        "svg", *drawn, class_="bar", width="100%", height=height, role="img",
        aria_label=f"{label}: {said}",
    )  # fmt: skip
