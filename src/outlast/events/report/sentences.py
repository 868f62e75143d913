"""The sentences of the report, for all views. Their words are in `sentences.jinja`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from importlib.resources import files

from outlast.events.report.model import Cause, HostTime, Party, Restart
from outlast.events.report.report import Mismatch, Report
from outlast.events.report.words import PARTS, listed, one_line, parts_of, plural, printable, share
from outlast.events.restart_causes import HANGS
from outlast.system.units import duration_text, size_text

_FAILURES = {
    "EXCEPTION": "raised an exception",
    "BASE_EXCEPTION": "left the job",
    "SOFT_TIMEOUT": "hung",
    "HARD_TIMEOUT": "hung and was terminated",
    "TERMINATED": "died",
    "UNRESPONSIVE": "stopped responding",
}
_ENDED_BY_ITSELF = ("TERMINATED", "WORKER_FAILED")  # the exit code says more than the message
_LAST_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_NAMED = 4


def describe(about: str, *subjects: object) -> list[str]:
    """The sentences about a subject: `restart`, `goodput` and so on, a macro of the template with
    its arguments.
    """
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
        **{"duration": duration_text, "size": size_text, "share": share, "plural": plural},
        **{"line": one_line, "listed": listed, "name": _name, "failure": _failure},
        **{"lost": _lost, "joined": _joined, "missed": _missed, "differing": _differing},
    }
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


def _joined(restart: Restart) -> str:
    return _parties(restart.joined, set())


def _parties(parties: Iterable[Party], known: set[str]) -> str:
    """The ranks with their hosts, grouped by the reason, which is named once unless it is known."""
    groups: dict[str, list[str]] = {}
    for party in parties:
        reason = "" if party.reason in known else one_line(party.reason)
        groups.setdefault(reason, []).append(f"rank {party.rank} on {one_line(party.host)}")
    texts = [
        f"{listed(ranks)} ({reason})" if reason else listed(ranks)
        for reason, ranks in groups.items()
    ]
    return listed(texts)


def _missed(report: Report) -> list[str]:
    """The planned faults that were never due."""
    return [
        one_line(f"{fault.kind} on rank {fault.rank}{f' ({fault.due})' if fault.due else ''}")
        for fault in report.injected
        if not fault.fired
    ]


def _differing(mismatch: Mismatch) -> list[str]:
    pairs = zip(mismatch.ranks, mismatch.hosts, strict=False)
    return [f"rank {rank} on {one_line(host)}" for rank, host in pairs]
