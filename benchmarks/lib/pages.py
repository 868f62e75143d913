"""Writes the tables of results between the two markers of a page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from benchmarks.lib.sheets import to_markdown

__all__ = ["MODULES", "load", "write_docs"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
MODULES = {
    "restart": ("inprocess.restart", "Restart latency"),
    "replacement": ("inprocess.replacement", "Replacement of a killed rank"),
    "hang": ("inprocess.hang", "Hangs"),
    "overhead": ("inprocess.overhead", "Cost without faults"),
    "scale": ("inprocess.scale", "Scale"),
    "hosts": ("hosts.scale", "Many hosts"),
    "death": ("hosts.death", "The death of a host"),
    "soak": ("inprocess.soak", "A thousand restarts in a row"),
    "checkpoint": ("checkpoint.run", "Checkpoints"),
    "copies": ("copies.run", "Copies in another host's memory"),
    "ablation": ("checkpoint.ablation", "Recycled files"),
    "recovery": ("recovery.run", "Beside other systems"),
    "elastic": ("elastic.run", "Elastic state"),
    "rollback": ("rollback.run", "No rollback where a replica survives"),
    "silent": ("elastic.silent", "Checks for silent faults"),
}
"""The module of each benchmark, and the title of its section on the page."""


def load(name: str) -> Any:
    """Imports the module of a benchmark."""
    return importlib.import_module(f"benchmarks.{MODULES[name][0]}")


def write_docs(page: Path, results: dict[str, Any]) -> None:
    """Writes the tables of `results` between the markers of `page`. A benchmark without a result
    keeps its tables.

    Raises:
        ValueError: if the page has no markers.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    figures, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {_BEGIN} and {_END}")
    present = _sections(figures)
    parts = []
    for name, (_, title) in MODULES.items():
        if name in results:
            parts.append(_section(name, results[name]))
        elif title in present:
            parts.append(present[title])
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(parts) + f"\n{_END}{after}")


def _sections(figures: str) -> dict[str, str]:
    """The sections of the page by title, each as `_section` returns it."""
    _, *found = re.split(r"^(?=## )", figures, flags=re.MULTILINE)
    return {each[3 : each.index("\n")]: each.rstrip("\n") + "\n" for each in found}


def _section(name: str, result: dict[str, Any]) -> str:
    machine = "; ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [f"## {MODULES[name][1]}", ""]
    if result["quick"]:
        lines.extend(["**A quick run: these figures only test the benchmark.**", ""])
    lines.extend(to_markdown(sheet) for sheet in load(name).sheets(result["data"]))
    lines.extend([f"Measured on: {machine}.", ""])
    return "\n".join(lines)
