"""The sentences about each restart: its faults, and the recovery that followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from outlast.events.report.figures.causes import kind_of
from outlast.events.report.model import Cause, HostLoss, Party, Restart
from outlast.events.report.report import Report
from outlast.events.report.words import listed, one_line, plural
from outlast.system.units import duration_text

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


def restart_title(number: int, restart: Restart, report: Report) -> str:
    """A heading: number of the restart, its iteration, and its call if there are several."""
    call = f", call {restart.call}" if report.calls > 1 else ""
    what = f"End of iteration {restart.iteration}{call}"
    if report.source == "launcher":
        what = "Restart of all processes" if restart.resumed else "End of the job"
    return f"{number}. {what}, {restart.at:.3f} s into the run"


def describe_restart(restart: Restart, report: Report) -> list[str]:
    """Sentences about one restart."""
    sentences = [*_describe_failure(restart)]
    detection, total = restart.phases.detection, restart.phases.total
    if detection is not None:
        sentences.append(
            f"Detected by every survivor on its host after {duration_text(detection)}."
        )
    for place in restart.swallowed:
        sentences.append(f"User code swallowed the interrupt at {one_line(place)}.")
    if restart.lost:
        known = {cause.message for cause in (restart.cause, *restart.others) if cause is not None}
        sentences.append(f"Lost: {_parties(restart.lost, known)}.")
    if restart.joined:
        sentences.append(f"Joined: {_parties(restart.joined, set())}.")
    if restart.redone_steps:
        sentences.append(f"{steps(restart.redone_steps, report)} had to be done again.")
    launcher = report.source == "launcher"
    if not restart.resumed:
        no_one = "No process was started" if launcher else "No rank entered the function"
        return [*sentences, f"{no_one} again."]
    since = "it was first detected" if restart.phases.total_from_seen else "the fault"
    since = "the end of the iteration" if restart.cause is None else since
    when = "" if total is None else f" {duration_text(total)} after {since}"
    ranks = plural(restart.world_size_after, "process" if launcher else "rank")
    return [*sentences, f"{ranks} {'started again' if launcher else 'back in the function'}{when}."]


def describe_host_loss(loss: HostLoss) -> str:
    """A sentence about a lost host."""
    how = "left the job" if loss.left else "was lost"
    when = f"{loss.at:.3f} s into the run as {loss.seen_by} saw it"
    return one_line(f"Host {loss.name} ({loss.address}) {how}, {when}: {loss.reason}.")


def steps(count: int, report: Report) -> str:
    """A number of steps, which is approximate if pings were counted."""
    return f"{'About ' if report.steps_from == 'pings' and count else ''}{plural(count, 'step')}"


def _describe_failure(restart: Restart) -> Iterable[str]:
    cause = restart.cause
    if restart.host_loss is not None:
        yield describe_host_loss(restart.host_loss)
        causes = [each for each in (cause, *restart.others) if each is not None]
        yield from _describe_consequences([each for each in causes if not each.overtaken])
    elif cause is None and restart.joined and not restart.lost:
        yield "No fault: the iteration ended so that new ranks could join."
    elif cause is None:
        reason = one_line(restart.reason)
        yield f"No process recorded a fault{f'; a survivor saw: {reason}' if reason else ''}."
    else:
        yield f"{_name(cause)} {_failure(cause)}."
        if cause.consequence:
            yield "That looks like the consequence of a fault that is not in the logs."
        if cause.overtaken:
            yield (
                "The restart interrupted this exception in the function, which may have handled it."
            )
        for other in restart.others:
            if other.overtaken:
                message = one_line(other.message)
                yield f"{_name(other)} was interrupted with an exception: {message}."
            elif not other.consequence:
                yield f"{_name(other)} also {_failure(other)}."
        yield from _describe_consequences([other for other in restart.others if other.consequence])


def _describe_consequences(faults: Sequence[Cause]) -> Iterable[str]:
    if faults:
        ranks = listed([str(rank) for rank in sorted(fault.rank for fault in faults)])
        # Its first sentence: torch adds advice about the connection.
        message = one_line(faults[0].message).partition(". ")[0].removesuffix(".")
        noun = "rank" if len(faults) == 1 else "ranks"
        yield f"Probably as a consequence, {noun} {ranks} failed: {message}."


def _name(cause: Cause) -> str:
    """The rank as the launcher names it in its messages, whose rank may be another."""
    where = [f"pid {cause.pid}"] if cause.pid >= 0 else []
    where.append(f"host {one_line(cause.host)}")
    if cause.launcher_rank not in (-1, cause.rank):
        where.append(f"rank {cause.launcher_rank} of the launcher")
    return f"Rank {cause.rank} ({', '.join(where)})"


def _failure(cause: Cause) -> str:
    kind, message = kind_of(cause), one_line(cause.message).removesuffix(".")
    text = _FAILURES.get(kind, "failed")
    ended = f"was {cause.exit}" if cause.exit.startswith("killed") else f"ended with {cause.exit}"
    if cause.exit and kind in _ENDED_BY_ITSELF:
        text, message = ended, message if kind == "WORKER_FAILED" else ""
    elif cause.exit:
        text = f"{text} and {ended}"
    text = f"{text}: {message}" if message else text
    frames = list(_LAST_FRAME.finditer(cause.traceback))
    if not frames:
        return text
    frame = frames[-1]
    file = one_line(frame["file"]).rpartition("/")[2]
    return f"{text} ({file}, line {frame['line']}, in {one_line(frame['name'])})"


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
