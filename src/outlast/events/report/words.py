"""Words, numbers and the names of the parts of the wall time, as all views have them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outlast.events.report.model import HostTime

_LISTED = 8
_SOURCE = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")
"""The path of a source file in a torch or gloo message; it is long and of no use here."""

PARTS = {
    "productive": ("productive", "training advanced"),
    "restarts": ("restarts", "from a fault until all ranks of the host were in the function again"),
    "replacements": ("waiting for replacements", "the restart waited for new processes"),
    "uneven": ("uneven start and end", "ranks entered or left the function at different times"),
    "hang": ("no progress", "hangs and lost hosts, until they were detected"),
    "setup": ("set-up and restore", "from the entry into the function to the end of the restore"),
    "saves": ("blocked by saves", "training waited for save()"),
    "redone": ("steps done again", "a later restore discarded their result"),
    "reduced": ("missing ranks", "the share of ranks that the job lacked"),
}
"""The parts of the wall time: name and meaning."""


def parts_of(host: HostTime) -> dict[str, float]:
    """The wall time of a host by `PARTS`, which add up to it."""
    lost, uneven = host.lost, host.lost.restart_parts.uneven
    return {
        "productive": host.productive_seconds,
        "restarts": max(0.0, lost.restart - lost.replacements - uneven),
        "replacements": lost.replacements,
        "uneven": uneven,
        **{name: getattr(lost, name) for name in ("hang", "setup", "saves", "redone", "reduced")},
    }


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
    return line if line.isprintable() else printable(line)


def printable(text: str) -> str:
    """The text without characters that would control a terminal; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def listed(names: Sequence[str], limit: int = _LISTED) -> str:
    """A list in words; a long one is shortened to its first names."""
    if len(names) > limit:
        names = [*names[:limit], f"{len(names) - limit} more"]
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
