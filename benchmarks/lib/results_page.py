"""Reads single figures from the tables of benchmarks/RESULTS.md."""

from __future__ import annotations

import re

__all__ = ["figure"]


def figure(page: str, table: str, row: str, column: str, *, last: bool = False) -> float:
    """A number from a table on the page: without thousands separators, unit, and what follows.

    Args:
        table: a heading above it; it is the first table of that part of the page.
        row: the first cell, or the first ones with " | " between them.
        column: its title; `last`: of several columns with this title, the last.

    Raises:
        LookupError: if the page has no such figure.
    """
    where = f"row {row!r}, column {column!r} of the table {table!r} in RESULTS.md"
    heading = re.search(rf"^(#+) {re.escape(table)}$", page, re.MULTILINE)
    if heading is None:
        raise LookupError(f"{where}: there is no such heading. `--write-docs` writes it")
    # Until the next heading of this level, or of a higher one.
    text = re.split(rf"^#{{1,{len(heading[1])}}} ", page[heading.end() :], flags=re.MULTILINE)[0]
    lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    columns = [number for number, title in enumerate(lines[0]) if title == column] if lines else []
    wanted = row.split(" | ")
    rows = [cells for cells in lines if cells[: len(wanted)] == wanted]
    number = re.match(r"[\d,.]+", rows[0][columns[-1 if last else 0]]) if rows and columns else None
    if number is None:
        raise LookupError(f"{where}: there is no such number")
    return float(number[0].replace(",", ""))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
