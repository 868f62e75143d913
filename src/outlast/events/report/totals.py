"""Sentences about the whole run: goodput, recovery times, planned faults, the end."""

from __future__ import annotations

from outlast.events.report.figures.recoveries import BACK
from outlast.events.report.model import HostTime, Report
from outlast.events.report.sentences import (
    describe_host_loss,
    describe_redone,
    describe_saves,
    describe_stop,
)
from outlast.events.report.silent_faults import describe_silent_faults
from outlast.events.report.words import listed, one_line, plural, share
from outlast.system.units import duration_text

_DAY_S = 86400.0
_SHORT_S = 600.0
_NAMED = 4

PARTS = {
    "replacements": "waiting for replacements",
    "restarts": "restarts",
    "uneven": "ranks that entered or left earlier than others",
    "hang": "no progress (hangs, lost hosts)",
    "setup": "set-up and restore",
    "saves": "blocked by saves",
    "redone": "steps done again",
    "reduced": "missing ranks",
}
"""The parts of the lost time, in words."""


def headline_host(report: Report) -> HostTime | None:
    """The host whose goodput is that of the run."""
    return max(report.hosts, key=lambda host: host.wall_seconds, default=None)


def lost_parts(host: HostTime) -> dict[str, float]:
    """The lost time by `PARTS`; adds up to the wall time without the productive time."""
    lost = host.lost
    apart = lost.replacements + lost.restart_parts.uneven
    return {
        "replacements": lost.replacements,
        "restarts": max(0.0, lost.restart - apart),
        "uneven": lost.restart_parts.uneven,
        "hang": lost.hang,
        "setup": lost.setup,
        "saves": lost.saves,
        "redone": lost.redone,
        "reduced": lost.reduced,
    }


def describe_goodput(report: Report) -> str:
    """What the goodput means, and where the rest of the time went."""
    host = headline_host(report)
    if host is None or host.goodput is None:
        return ""
    where = f" on {host.host}" if len(report.hosts) > 1 else ""
    text = (
        f"Goodput is the share of the wall time in which training advanced: "
        f"{duration_text(host.productive_seconds)} of {duration_text(host.wall_seconds)}{where}."
    )
    parts = sorted(lost_parts(host).items(), key=lambda part: -part[1])
    named = [
        f"{PARTS[name]} {share(seconds / host.wall_seconds)}"
        for name, seconds in parts
        if seconds >= 0.0005 * host.wall_seconds
    ]
    if named:
        text += f" The rest: {listed(named[:_NAMED] + ['others'] * (len(named) > _NAMED))}."
    lost = host.wall_seconds - host.productive_seconds
    if lost > 0.01 * host.wall_seconds and host.wall_seconds < _SHORT_S:
        text += (
            f" The run was short: {duration_text(lost)} lost in a day would be a goodput of "
            f"{share(1 - lost / _DAY_S)}."
        )
    return text


def describe_recovery(report: Report) -> str:
    """The percentiles of the restarts in one line; empty for fewer than two."""
    back = report.recovery.get(BACK)
    if back is None or back.count < 2:
        return ""
    text = (
        f"Back in the function after {duration_text(back.p50)} (p50) or {duration_text(back.p99)} "
        f"(p99), over {plural(back.count, 'restart')}"
    )
    restore = report.recovery.get("restore")
    if restore is not None:
        text += (
            f"; the restore then took {duration_text(restore.p50)} (p50) or "
            f"{duration_text(restore.p99)} (p99)"
        )
    return text + "."


def describe_injected(report: Report) -> list[str]:
    """Sentences about the faults of the plan."""
    if not report.injected:
        return []
    fired = sum(fault.fired for fault in report.injected)
    sentences = [f"Planned faults: {fired} of {len(report.injected)} fired."]
    missed = [
        f"{fault.kind} on rank {fault.rank}{f' ({fault.due})' if fault.due else ''}"
        for fault in report.injected
        if not fault.fired
    ]
    if missed:
        sentences.append(f"Never due, so not fired: {listed(missed)}.")
    return sentences


def describe_no_restart(report: Report) -> str:
    """What the exit code 93 says."""
    ranks = sorted(set(report.no_restart))
    noun = "Rank" if len(ranks) == 1 else "Ranks"
    return (
        f"{noun} {listed([str(rank) for rank in ranks])} ended with exit code 93: a restart does "
        "not fix this fault, so the job ended without another one. Do not requeue it before the "
        "cause is fixed."
    )


def describe_end(report: Report) -> str:
    """How the job ended, after which restarts; empty if there were none."""
    if not report.restart_causes:
        return ""
    ended = report.stop is not None or any(not restart.resumed for restart in report.restarts)
    how = "Ended" if ended else "Completed"
    how = "So far" if report.no_end or not (ended or report.completed) else f"{how} after"
    return f"{how} {report.restart_causes}."


def ending(report: Report) -> list[str]:
    """Sentences about the end of the run, and what else was recorded."""
    sentences = [sentence for sentence in [describe_end(report)] if sentence]
    sentences += [one_line(describe_host_loss(loss)) for loss in report.hosts_lost]
    sentences += describe_silent_faults(report)
    if report.no_restart:
        sentences.append(describe_no_restart(report))
    sentences += [one_line(sentence) for sentence in describe_injected(report)]
    if report.stop is not None:
        sentences.append(describe_stop(report.stop))
    if report.no_end:
        sentences.append(
            "The log has no end of the job: it still runs, or its launcher was killed. All figures "
            "are up to the last event."
        )
    ended = report.stop is None and not report.no_end
    if report.source == "launcher" and (report.completed or ended):
        sentences.append(f"{plural(report.completed, 'process')} ended with exit code 0.")
    if report.source == "wrapper" and (report.completed or ended):
        who = plural(report.completed, "rank") if report.completed else "No rank is known to have"
        sentences.append(f"{who} completed the function.")
    if redone := describe_redone(report):
        sentences.append(redone)
    if report.saves is not None:
        sentences += [one_line(sentence) for sentence in describe_saves(report.saves)]
    if report.monitors_restarted:
        sentences.append(f"{plural(report.monitors_restarted, 'monitor process')} restarted.")
    for party in report.waiting:
        sentences.append(
            f"A process on {one_line(party.host)} asked to join and was never admitted."
        )
    if report.notes:
        counted = ", ".join(f"{one_line(name)} {count}" for name, count in report.notes.items())
        sentences.append(f"Notes: {counted}.")
    for file in report.torn_logs:
        sentences.append(
            f"{one_line(file)}: the last line is torn (its process died while writing it) and was "
            "skipped."
        )
    return sentences
