"""The sentences of a report: the faults, the recovery that followed, the checkpoints, the stop."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from outlast.events.report.figures.causes import kind_of, what_failed, what_happened
from outlast.events.report.model import Cause, HostLoss, Party, Report, Restart, Saves, Stop
from outlast.events.report.words import listed, one_line, plural, without_end
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
_CAUSES = 3
_LAST_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)


def cause_text(restart: Restart) -> str:
    """The first cause in a few words, for a table; `describe_restart` has all of it."""
    if restart.host_loss is not None:
        return f"host {one_line(restart.host_loss.name)}: lost"
    if restart.cause is not None:
        return f"rank {restart.cause.rank}: {what_failed(restart.cause)}"
    if restart.lost:
        return f"rank {restart.lost[0].rank}: lost"
    return what_happened(restart)


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
        after = duration_text(detection)
        sentences.append(f"Detected by every survivor on its host after {after}.")
    for place in restart.swallowed:
        sentences.append(f"User code swallowed the interrupt at {one_line(place)}.")
    if restart.lost:
        known = {cause.message for cause in (restart.cause, *restart.others) if cause is not None}
        sentences.append(f"Lost: {_parties(restart.lost, known)}.")
    if restart.joined:
        sentences.append(f"Joined: {_parties(restart.joined, set())}.")
    if restart.redone_steps:
        sentences.append(f"{_steps(restart.redone_steps, report)} had to be done again.")
    in_launcher = report.source == "launcher"
    if not restart.resumed:
        no_more = "No process was started again." if in_launcher else ""
        return [*sentences, no_more or "No rank entered the function again."]
    when = "" if total is None else f" {duration_text(total)} after {_start_of_total(restart)}"
    ranks = plural(restart.world_size_after, "process" if in_launcher else "rank")
    place = "started again" if in_launcher else "back in the function"
    return [*sentences, f"{ranks} {place}{when}."]


def describe_saves(saves: Saves) -> list[str]:
    """Sentences about the checkpoints."""
    sentences = []
    if saves.committed:
        sentences.append(
            f"{plural(saves.committed, 'checkpoint')} of {size_text(saves.size_bytes)} "
            f"committed: each blocked training for {duration_text(saves.blocked_median)} (median; "
            f"{duration_text(saves.blocked_worst)} at worst) and was durable after "
            f"{duration_text(saves.durable_median)}."
        )
        sentences.append(f"The newest checkpoint is that of step {saves.newest}.")
    if saves.copied:
        sentences.append(
            f"{plural(saves.copied, 'save')} copied to other hosts' memory: "
            f"{size_text(saves.copied_bytes)} from rank 0 in {duration_text(saves.copied_median)} "
            "(median)."
        )
    sentences += [
        f"Not copied to other hosts' memory: {f'step {step}, ' if step >= 0 else ''}{cause}."
        for step, cause in saves.not_copied[:_CAUSES]
    ]
    if len(saves.not_copied) > _CAUSES:
        sentences.append(f"{len(saves.not_copied) - _CAUSES} more saves were not copied.")
    if saves.failed:
        steps = ", ".join(str(step) for step, _ in saves.failed)
        sentences.append(f"Failed on all ranks, not committed: step {steps}.")
    if saves.passed_over:
        steps = ", ".join(str(step) for step, _ in saves.passed_over)
        sentences.append(f"Damaged, skipped by a restore: step {steps}.")
    if saves.restored:
        each = ", ".join(f"step {step} from {source}" for step, source in saves.restored)
        sentences.append(f"Restored: {each}.")
    return sentences


def describe_redone(report: Report) -> str:
    """A sentence about redone steps; empty if there are none."""
    resumed = sum(restart.resumed for restart in report.restarts)
    if not resumed:
        return ""
    if not report.redone_known:
        return (
            "Redone steps cannot be known, and count as productive: no restart restored a "
            "checkpoint of outlast."
        )
    if report.redone_steps is None:
        return (
            "The number of redone steps is not known, only the time they took: `outlast.Job` "
            "records steps, and so do pings."
        )
    return f"{_steps(report.redone_steps, report)} had to be done again, after all restarts."


def describe_stop(stop: Stop) -> str:
    """A sentence about the request to stop."""
    exits = f" The processes ended: {listed(stop.exits)}." if stop.exits else ""
    return (
        f"The job was told to stop, {stop.at:.3f} s into the run: {one_line(stop.reason)}.{exits}"
    )


def describe_host_loss(loss: HostLoss) -> str:
    """A sentence about a lost host."""
    how = "left the job" if loss.left else "was lost"
    where = f"Host {loss.name} ({loss.address}) {how}"
    return f"{where}, {loss.at:.3f} s into the run as {loss.seen_by} saw it: {loss.reason}."


def _steps(count: int, report: Report) -> str:
    about = "About " if report.steps_from == "pings" and count else ""
    return f"{about}{plural(count, 'step')}"


def _start_of_total(restart: Restart) -> str:
    if restart.cause is None:
        return "the end of the iteration"
    return "it was first detected" if restart.phases.total_from_seen else "the fault"


def _describe_failure(restart: Restart) -> Iterable[str]:
    cause = restart.cause
    if restart.host_loss is not None:
        yield one_line(describe_host_loss(restart.host_loss))
        causes = [each for each in (cause, *restart.others) if each is not None]
        yield from _describe_consequences([each for each in causes if not each.overtaken])
        return
    if cause is None:
        reason = one_line(restart.reason)
        if restart.joined and not restart.lost:
            yield "No fault: the iteration ended so that new ranks could join."
        else:
            yield f"No process recorded a fault{f'; a survivor saw: {reason}' if reason else ''}."
        return
    yield f"{_name(cause)} {_failure(cause)}."
    if cause.consequence:
        yield "That looks like the consequence of a fault that is not in the logs."
    if cause.overtaken:
        yield "The restart interrupted this exception in the function, which may have handled it."
    for other in restart.others:
        if other.overtaken:
            yield f"{_name(other)} was interrupted with an exception: {one_line(other.message)}."
        elif not other.consequence:
            yield f"{_name(other)} also {_failure(other)}."
    yield from _describe_consequences([other for other in restart.others if other.consequence])


def _describe_consequences(faults: Sequence[Cause]) -> Iterable[str]:
    if not faults:
        return
    ranks = listed([str(rank) for rank in sorted(fault.rank for fault in faults)])
    noun = "rank" if len(faults) == 1 else "ranks"
    # Its first sentence: torch adds advice about the connection.
    message = one_line(faults[0].message).partition(". ")[0]
    yield f"Probably as a consequence, {noun} {ranks} failed: {without_end(message)}."


def _name(cause: Cause) -> str:
    """The rank as the launcher names it in its messages, whose rank may be another."""
    where = [f"pid {cause.pid}"] if cause.pid >= 0 else []
    where.append(f"host {one_line(cause.host)}")
    if cause.launcher_rank not in (-1, cause.rank):
        where.append(f"rank {cause.launcher_rank} of the launcher")
    return f"Rank {cause.rank} ({', '.join(where)})"


def _failure(cause: Cause) -> str:
    message = without_end(one_line(cause.message))
    text = _FAILURES.get(kind_of(cause), "failed")
    ended = f"was {cause.exit}" if cause.exit.startswith("killed") else f"ended with {cause.exit}"
    if cause.exit and kind_of(cause) in _ENDED_BY_ITSELF:
        text = ended
        message = message if kind_of(cause) == "WORKER_FAILED" else ""
    elif cause.exit:
        text = f"{text} and {ended}"
    text = f"{text}: {message}" if message else text
    frames = list(_LAST_FRAME.finditer(cause.traceback))
    if frames:
        frame = frames[-1]
        file = one_line(frame["file"]).rpartition("/")[2]
        text += f" ({file}, line {frame['line']}, in {one_line(frame['name'])})"
    return text


def _parties(parties: Iterable[Party], known: set[str]) -> str:
    return listed(
        [
            f"rank {party.rank} on {one_line(party.host)}"
            + (f" ({one_line(party.reason)})" if party.reason and party.reason not in known else "")
            for party in parties
        ]
    )
