"""Tables of results, for the terminal and for the documentation."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["Sheet", "median", "ms", "quantile", "show", "to_markdown"]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table; the first column contains text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def show(console: Console, sheet: Sheet) -> None:
    """Prints a sheet."""
    table = Table(title=sheet.title, title_justify="left", caption=sheet.note or None)
    table.caption_justify = "left"
    for index, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in sheet.rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def to_markdown(sheet: Sheet) -> str:
    """The sheet as a Markdown table under a heading."""
    lines = [f"### {sheet.title}", ""]
    lines.append("| " + " | ".join(sheet.columns) + " |")
    lines.append("|" + "|".join([" --- ", *(" ---: " for _ in sheet.columns[1:])]) + "|")
    lines.extend("| " + " | ".join(row) + " |" for row in sheet.rows)
    if sheet.note:
        lines.extend(["", sheet.note])
    return "\n".join([*lines, ""])


def ms(seconds: float | None) -> str:
    """A duration in milliseconds, with three significant digits."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that `share` of them do not exceed; no value is made up between
    two measured ones.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def median(values: Sequence[float]) -> float | None:
    """The median, or `None` without values."""
    return statistics.median(values) if values else None
