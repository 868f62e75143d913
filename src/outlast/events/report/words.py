"""Words and numbers in the sentences of a report."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LISTED = 8
_SOURCE = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")
"""The path of a source file in a torch or gloo message; it is long and of no use here."""


def plural(count: int, noun: str) -> str:
    """`count` and the noun: 1 rank, 2 ranks, 2 processes."""
    ending = "" if count == 1 else ("es" if noun.endswith("s") else "s")
    return f"{count} {noun}{ending}"


def share(part: float) -> str:
    """A fraction as a percentage, never rounded up to 100 %."""
    return "100 %" if part >= 1 else f"{min(part * 100, 99.99):.2f} %"


def one_line(text: str) -> str:
    """The first non-empty line, without control characters and paths of C++ sources."""
    lines = (_SOURCE.sub("", line).strip() for line in text.splitlines())
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else "�" for char in line)


def listed(names: Sequence[str]) -> str:
    """A list in words; a long one is shortened to its first names."""
    if len(names) > _LISTED:
        names = [*names[:_LISTED], f"{len(names) - _LISTED} more"]
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def without_end(text: str) -> str:
    """Without the period that a sentence adds."""
    return text.removesuffix(".")
