"""Words and numbers as all views have them: causes, the parts of the wall time, lists."""

from __future__ import annotations

import re
from collections.abc import Iterable

from outlast.events import restart_causes
from outlast.events.report.model import Cause, HostTime, Restart
from outlast.events.restart_causes import HOST_LOST, JOINED

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


def listed(values: Iterable[object], limit: int = _LISTED) -> str:
    """A list in words; a long one is shortened to its first values."""
    names = [str(value) for value in values]
    if len(names) > limit:
        names = [*names[:limit], f"{len(names) - limit} more"]
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def what_failed(cause: Cause) -> str:
    """A fault of a rank in a few words: the type of an exception and its line, or its kind."""
    message, where = one_line(cause.message), one_line(cause.where)
    return restart_causes.what_failed(cause.interruption, message, where, cause.exit)


def what_happened(restart: Restart) -> str:
    """The first cause in a few words, without rank and host."""
    if restart.host_loss is not None:
        return HOST_LOST
    if restart.cause is not None:
        return what_failed(restart.cause)
    if restart.lost:
        return "rank lost"
    return JOINED if restart.joined else one_line(restart.reason) or "not recorded"


def cause_text(restart: Restart) -> str:
    """The first cause in a few words, with its rank or host."""
    if restart.host_loss is not None:
        return f"host {one_line(restart.host_loss.name)}: lost"
    if restart.cause is None and restart.lost:
        return f"rank {restart.lost[0].rank}: lost"
    rank = "" if restart.cause is None else f"rank {restart.cause.rank}: "
    return rank + what_happened(restart)
