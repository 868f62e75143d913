"""The sentences about a whole run: goodput, recovery times, checkpoints, silent faults, its end."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.events.report.builder import BACK
from outlast.events.report.model import HostTime
from outlast.events.report.report import Mismatch, Report, Saves, Stop, Straggler
from outlast.events.report.views.sentences import describe_host_loss, steps
from outlast.events.report.words import PARTS, listed, one_line, parts_of, plural, share
from outlast.system.units import duration_text, size_text

_DAY_S, _SHORT_S = 86400.0, 600.0
_NAMED = 4


def headline_host(report: Report) -> HostTime | None:
    """The host whose goodput is that of the run."""
    return max(report.hosts, key=lambda host: host.wall_seconds, default=None)


def describe_goodput(report: Report) -> str:
    """What the goodput means, and where the rest of the time went."""
    host = headline_host(report)
    if host is None or host.goodput is None:
        return ""
    wall = host.wall_seconds
    where = f" on {one_line(host.host)}" if len(report.hosts) > 1 else ""
    text = (
        f"Goodput is the share of the wall time in which training advanced: "
        f"{duration_text(host.productive_seconds)} of {duration_text(wall)}{where}."
    )
    parts = sorted(parts_of(host).items(), key=lambda part: -part[1])
    named = [
        f"{PARTS[name][0]} {share(seconds / wall)}"
        for name, seconds in parts
        if name != "productive" and seconds >= 0.0005 * wall
    ]
    if named:
        text += f" The rest: {listed(named[:_NAMED] + ['others'] * (len(named) > _NAMED))}."
    lost = wall - host.productive_seconds
    if lost > 0.01 * wall and wall < _SHORT_S:
        text += (
            f" The run was short: {duration_text(lost)} lost in a day would be a goodput of "
            f"{share(1 - lost / _DAY_S)}."
        )
    return text


def describe_recovery(report: Report) -> str:
    """The times of the restarts in one line; empty for fewer than two. Percentiles mean something
    for many only.
    """
    back, restore = report.recovery.get(BACK), report.recovery.get("restore")
    if back is None or back.count < 2:
        return ""

    def times(name: str) -> str:
        found = report.recovery[name]
        if found.p99 is None:
            return f"{duration_text(found.p50)} (median; {duration_text(found.worst)} at worst)"
        return f"{duration_text(found.p50)} (p50) or {duration_text(found.p99)} (p99)"

    then = "" if restore is None else f"; the restore then took {times('restore')}"
    count = plural(back.count, "restart")
    return f"Back in the function after {times(BACK)}, over {count}{then}."


def describe_injected(report: Report) -> list[str]:
    """Sentences about the faults of the plan."""
    if not report.injected:
        return []
    fired = sum(fault.fired for fault in report.injected)
    missed = [
        f"{fault.kind} on rank {fault.rank}{f' ({fault.due})' if fault.due else ''}"
        for fault in report.injected
        if not fault.fired
    ]
    sentences = [f"Planned faults: {fired} of {len(report.injected)} fired."]
    sentences += [f"Never due, so not fired: {listed(missed)}."] if missed else []
    return [one_line(sentence) for sentence in sentences]


def describe_no_restart(report: Report) -> str:
    """What the exit code 93 says."""
    ranks = sorted(set(report.no_restart))
    return (
        f"{'Rank' if len(ranks) == 1 else 'Ranks'} {listed([str(rank) for rank in ranks])} ended "
        "with exit code 93: a restart does not fix this fault, so the job ended without another "
        "one. Do not requeue it before the cause is fixed."
    )


def describe_end(report: Report) -> str:
    """How the job ended, after which restarts; empty if there were none."""
    if not report.restart_causes:
        return ""
    ended = report.stop is not None or any(not restart.resumed for restart in report.restarts)
    how = "Ended after" if ended else "Completed after"
    how = "So far" if report.no_end or not (ended or report.completed) else how
    return f"{how} {report.restart_causes}."


def describe_stop(stop: Stop) -> str:
    """A sentence about the request to stop."""
    exits = f" The processes ended: {listed(stop.exits)}." if stop.exits else ""
    return (
        f"The job was told to stop, {stop.at:.3f} s into the run: {one_line(stop.reason)}.{exits}"
    )


def describe_redone(report: Report) -> str:
    """A sentence about redone steps; empty if there are none."""
    if not report.restart_count:
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
    return f"{steps(report.redone_steps, report)} had to be done again, after all restarts."


def describe_saves(saves: Saves) -> list[str]:
    """Sentences about the checkpoints."""
    found = []
    if saves.committed:
        count = plural(saves.committed, "checkpoint")
        many = saves.committed > 1
        each = ": each" if many else ": it"
        worst = f" (median; {duration_text(saves.blocked_worst)} at worst)" if many else ""
        found.append(
            f"{count} of {size_text(saves.size_bytes)} committed{each} blocked training for "
            f"{duration_text(saves.blocked_median)}{worst} and was durable after "
            f"{duration_text(saves.durable_median)}."
        )
        found.append(f"The newest checkpoint is that of step {saves.newest}.")
    if saves.copied:
        found.append(
            f"{plural(saves.copied, 'save')} copied to other hosts' memory: "
            f"{size_text(saves.copied_bytes)} from rank 0 in {duration_text(saves.copied_median)} "
            "(median)."
        )
    for step, cause in saves.not_copied[:3]:
        which = f"step {step}, " if step >= 0 else ""
        found.append(f"Not copied to other hosts' memory: {which}{cause}.")
    if len(saves.not_copied) > 3:
        found.append(f"{len(saves.not_copied) - 3} more saves were not copied.")
    if saves.failed:
        found.append(f"Failed on all ranks, not committed: step {_steps(saves.failed)}.")
    if saves.passed_over:
        found.append(f"Damaged, skipped by a restore: step {_steps(saves.passed_over)}.")
    if saves.restored:
        each = ", ".join(f"step {step} from {source}" for step, source in saves.restored)
        found.append(f"Restored: {each}.")
    return [one_line(sentence) for sentence in found]


def ending(report: Report, saves: bool = True) -> list[str]:
    """Sentences about the end of the run, and what else was recorded."""
    found = [describe_end(report), *map(describe_host_loss, report.hosts_lost)]
    found += map(_describe_mismatch, report.mismatches)
    found += map(_describe_straggler, report.stragglers)
    found += [describe_no_restart(report)] if report.no_restart else []
    found += describe_injected(report)
    found += [] if report.stop is None else [describe_stop(report.stop)]
    if report.no_end:
        found.append(
            "The log has no end of the job: it still runs, or its launcher was killed. All figures "
            "are up to the last event."
        )
    found += _completed(report)
    found.append(describe_redone(report))
    found += describe_saves(report.saves) if saves and report.saves else []
    if report.monitors_restarted:
        found.append(f"{plural(report.monitors_restarted, 'monitor process')} restarted.")
    for party in report.waiting:
        found.append(f"A process on {one_line(party.host)} asked to join and was never admitted.")
    if report.notes:
        counted = ", ".join(f"{one_line(name)} {count}" for name, count in report.notes.items())
        found.append(f"Notes: {counted}.")
    for file in report.torn_logs:
        found.append(
            f"{one_line(file)}: the last line is torn (its process died while writing it) and was "
            "skipped."
        )
    return [sentence for sentence in found if sentence]


def _completed(report: Report) -> Iterator[str]:
    if report.completed or (report.stop is None and not report.no_end):
        if report.source == "launcher":
            yield f"{plural(report.completed, 'process')} ended with exit code 0."
        if report.source == "wrapper":
            who = (
                plural(report.completed, "rank") if report.completed else "No rank is known to have"
            )
            yield f"{who} completed the function."


def _describe_mismatch(mismatch: Mismatch) -> str:
    pairs = zip(mismatch.ranks, mismatch.hosts, strict=False)
    each = [f"rank {rank} on {one_line(host)}" for rank, host in pairs]
    found = f"{listed(each) if each else 'unknown ranks'} differed"
    if mismatch.majority:
        found += f" from the other {mismatch.replicas - len(each)} replicas"
    else:
        found += ", without a majority that says which was wrong"
    names = [one_line(name) for name in mismatch.parameters]
    where = f" in {listed(names, 3)}" if names else ""
    again = f", in {mismatch.checks} checks" if mismatch.checks > 1 else ""
    return one_line(
        f"Parameters: after step {mismatch.step}, {found}{where}{again}; they were equal after "
        f"step {mismatch.clean_step}."
    )


def _describe_straggler(straggler: Straggler) -> str:
    return one_line(
        f"Straggler: rank {straggler.rank} on {one_line(straggler.straggler_host)}, found after "
        f"step {straggler.step}: {duration_text(straggler.seconds)} for its own part of a step; "
        f"the other ranks took {duration_text(straggler.typical_seconds)}."
    )


def _steps(saves: tuple[tuple[int, str], ...]) -> str:
    return ", ".join(str(step) for step, _ in saves)
