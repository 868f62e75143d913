"""Writes the tables of results between the two markers of a page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.lib.sheets import to_markdown

__all__ = ["write_docs"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_TITLES = {
    "restart": "Restart latency",
    "hang": "Hangs",
    "overhead": "Cost without faults",
    "scale": "Scale",
    "soak": "A thousand restarts in a row",
    "checkpoint": "Checkpoints",
    "elastic": "Elastic state",
}


def write_docs(page: Path, results: dict[str, Any]) -> None:
    """Puts the tables of `results` between the markers of `page`.

    Raises:
        ValueError: if the page has no markers.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {_BEGIN} and {_END}")
    parts = [_section(name, results[name]) for name in _TITLES if name in results]
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(parts) + f"\n{_END}{after}")


def _section(name: str, result: dict[str, Any]) -> str:
    module = importlib.import_module(f"benchmarks.{name}")
    machine = "; ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [f"## {_TITLES[name]}", ""]
    if result["quick"]:
        lines.extend(["**A quick run: these figures only show that it works.**", ""])
    lines.extend(to_markdown(sheet) for sheet in module.sheets(result["data"]))
    lines.extend([f"Measured on: {machine}.", ""])
    return "\n".join(lines)
