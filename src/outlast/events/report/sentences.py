"""The words of the report, for all views; `sentences.jinja` has the texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from importlib.resources import files

from outlast.events import restart_causes
from outlast.events.report.model import Cause, HostTime, Party, Restart
from outlast.events.report.report import Mismatch, Report
from outlast.events.restart_causes import HANGS, HOST_LOST, JOINED, MOVED, Interruption
from outlast.system.units import duration_text, size_text

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
    if restart.moved:
        return MOVED
    if restart.lost:
        return "rank lost"
    return JOINED if restart.joined else one_line(restart.reason) or "not recorded"


def cause_text(restart: Restart) -> str:
    """The first cause in a few words, with its rank or host."""
    if restart.host_loss is not None:
        return f"host {one_line(restart.host_loss.name)}: lost"
    if restart.moved:
        return f"{MOVED}: {one_line(restart.moved)}"
    if restart.cause is None and restart.lost:
        return f"rank {restart.lost[0].rank}: lost"
    rank = "" if restart.cause is None else f"rank {restart.cause.rank}: "
    return rank + what_happened(restart)


_FAILURES: dict[str, str] = {
    Interruption.EXCEPTION: "raised an exception",
    Interruption.BASE_EXCEPTION: "left the job",
    Interruption.SOFT_TIMEOUT: "hung",
    Interruption.HARD_TIMEOUT: "hung and was terminated",
    Interruption.TERMINATED: "died",
    Interruption.UNRESPONSIVE: "stopped responding",
}
# The exit code says more than the message.
_ENDED_BY_ITSELF = (Interruption.TERMINATED, "WORKER_FAILED")
_LAST_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_NAMED = 4


def describe(about: str, *subjects: object) -> list[str]:
    """The sentences about a subject, such as `goodput`: a macro of the template, with arguments."""
    text: str = getattr(_template(), about)(*subjects)
    return [printable(line) for line in text.split("\n") if line]


def describe_goodput(report: Report) -> str:
    """What the goodput means, and where the rest of the time went; empty if it is not known."""
    host = headline_host(report)
    if host is None or host.goodput is None:
        return ""
    lost = lost_time(host)
    named = lost[:_NAMED] + ["others"] * (len(lost) > _NAMED)
    return " ".join(describe("goodput", report, host, named))


def describe_cause(cause: Cause) -> str:
    """A fault without the end of its sentence: the rank, and how it failed."""
    return f"{_name(cause)} {_failure(cause)}"


def lost_time(host: HostTime) -> list[str]:
    """The shares of the wall time that advanced nothing, the largest first."""
    return [
        f"{PARTS[name][0]} {share(seconds / host.wall_seconds)}"
        for name, seconds in sorted(parts_of(host).items(), key=lambda part: -part[1])
        if name != "productive" and seconds >= 0.0005 * host.wall_seconds
    ]


def headline_host(report: Report) -> HostTime | None:
    """The host whose goodput is that of the run."""
    return max(report.hosts, key=lambda host: host.wall_seconds, default=None)


@functools.cache
def _template() -> object:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Callable[..., object]] = {
        "duration": duration_text, "size": size_text, "share": share, "plural": plural,
        "line": one_line, "listed": listed, "name": _name, "failure": _failure,
        "lost": _lost, "joined": lambda restart: _parties(restart.joined, set()),
        "missed": _missed, "differing": _differing,
    }  # fmt: skip
    environment.filters |= filters
    text = files("outlast.events.report").joinpath("sentences.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).module


def _name(cause: Cause) -> str:
    """The rank as the launcher names it in its messages, whose rank may be another."""
    where = [f"pid {cause.pid}"] if cause.pid >= 0 else []
    where.append(f"host {one_line(cause.host)}")
    if cause.launcher_rank not in (-1, cause.rank):
        where.append(f"rank {cause.launcher_rank} of the launcher")
    return f"Rank {cause.rank} ({', '.join(where)})"


def _failure(cause: Cause) -> str:
    kind, message = cause.interruption, one_line(cause.message).removesuffix(".")
    text = _FAILURES.get(kind, "failed")
    ended = f"was {cause.exit}" if cause.exit.startswith("killed") else f"ended with {cause.exit}"
    if cause.exit and kind in _ENDED_BY_ITSELF:
        text, message = ended, message if kind == "WORKER_FAILED" else ""
    elif cause.exit and kind not in HANGS:  # it was killed only then
        text = f"{text} and {ended}"
    text = f"{text}: {message}" if message else text
    frames = list(_LAST_FRAME.finditer(cause.traceback))
    if not frames:
        return text
    frame = frames[-1]
    file = one_line(frame["file"]).rpartition("/")[2]
    return f"{text} ({file}, line {frame['line']}, in {one_line(frame['name'])})"


def _lost(restart: Restart) -> str:
    causes = (restart.cause, *restart.others)
    return _parties(restart.lost, {cause.message for cause in causes if cause is not None})


def _parties(parties: Iterable[Party], known: set[str]) -> str:
    """The ranks with their hosts, grouped by the reason, which is named once unless it is known."""
    groups: dict[str, list[str]] = {}
    for party in parties:
        reason = "" if party.reason in known else one_line(party.reason)
        where = f" on {one_line(party.host)}" if party.host else ""  # its log may be missing
        groups.setdefault(reason, []).append(f"rank {party.rank}{where}")
    texts = [
        f"{listed(ranks)} ({reason})" if reason else listed(ranks)
        for reason, ranks in groups.items()
    ]
    return listed(texts)


def _missed(report: Report) -> list[str]:
    return [
        one_line(f"{fault.kind} on rank {fault.rank}{f' ({fault.due})' if fault.due else ''}")
        for fault in report.injected
        if not fault.fired
    ]


def _differing(mismatch: Mismatch) -> list[str]:
    pairs = zip(mismatch.ranks, mismatch.hosts, strict=False)
    return [f"rank {rank} on {one_line(host)}" for rank, host in pairs]
