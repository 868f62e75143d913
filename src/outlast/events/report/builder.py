"""Builds the report from the events of a run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import outlast.events.types as ev
from outlast.errors import NO_RESTART
from outlast.events.event import Event, Note
from outlast.events.report.calls import Call
from outlast.events.report.checkpoints import redone_steps, summarize_saves
from outlast.events.report.course import (
    course_of,
    find_losses,
    name_lost_hosts,
    waits_for_lost_hosts,
)
from outlast.events.report.goodput import HostAccount
from outlast.events.report.model import Distribution, Recovery, Restart
from outlast.events.report.report import (
    CauseCount,
    HostCount,
    InjectedFault,
    Mismatch,
    Report,
    Skip,
    StepCpu,
    Stop,
    Straggler,
)
from outlast.events.report.run import Run, record
from outlast.events.report.sentences import what_happened
from outlast.events.report.timeline import timeline_of
from outlast.events.restart_causes import RestartCount, describe_restarts
from outlast.events.spool import DROPPED
from outlast.system.error_text import exit_summary

BACK = "back"
"""From the fault until the ranks are in the function again (`Phases.total`)."""

_PERCENTILES_FROM = 20


def build(events: Iterable[Event]) -> Report:
    """Builds the report; the events of one process must be in the order in which it wrote them."""
    run = Run(events)
    calls = [Call(run, number) for number in range(len(run.calls))]
    course = course_of(run, calls)
    losses = find_losses(run)
    named = name_lost_hosts(course, losses)
    stretches = waits_for_lost_hosts(course, named)
    accounts = {
        host: HostAccount(run, host, stretches.get(host, []), walls)
        for host, walls in sorted(course.walls.items())
    }
    recoveries = _recoveries(accounts.values())
    counts, steps_from, redone_known = redone_steps(course.segments, run)
    restarts = tuple(
        dataclasses.replace(
            each.restart,
            redone_steps=counts[each.place],
            host_loss=None if loss is None else loss.loss,
            recovery=_recovery_of(each.restart, recoveries) if each.restart.resumed else None,
        )
        for each, loss in zip(course.ended, named, strict=True)
    )
    hosts = tuple(account.time() for account in accounts.values())
    longest = max(hosts, key=lambda host: host.wall_seconds, default=None)
    redone = [restart.redone_steps for restart in restarts if restart.resumed]
    counted = [restart for restart in restarts if not (restart.moved and restart.lost)]
    lost = sum(len(restart.lost) for restart in counted)
    joined = sum(len(restart.joined) for restart in counted)
    saves, injected = summarize_saves(run), _injected(run)
    started, ends = run.all(ev.LauncherStarted), run.all(ev.LauncherEnded)
    dropped = {
        (n.host, n.data["file"]): n.data["bytes"] for n in run.all(Note) if n.name == DROPPED
    }
    no_restart = [e.rank for e in run.all(ev.WorkerExited) if e.exit_code == NO_RESTART]
    return Report(
        run_id=started[0].run_id if started else "",
        command=started[0].command if started else "",
        source=course.source,
        events=len(run.events),
        calls=len(calls),
        hosts=hosts,
        world_size=course.world_size,
        restarts=restarts,
        restart_count=len(redone),
        lost=lost,
        joined=joined,
        replaced=min(lost, joined),
        recovery_seconds=sum(restart.phases.total or 0.0 for restart in restarts),
        goodput=None if longest is None else longest.goodput,
        redone_steps=None if None in redone else sum(count or 0 for count in redone),
        steps_from=steps_from,
        redone_known=redone_known,
        stop=_stop(run),
        waiting=tuple(party for call in calls for party in call.waiting()),
        completed=course.completed,
        monitors_restarted=len(run.all(ev.MonitorRestarted)),
        notes=dict(sorted(Counter(note.name for note in run.all(Note)).items())),
        torn_logs=tuple(sorted(run.torn)),
        dropped_bytes=sum(dropped.values()),
        last_lines=next((end.last_lines for end in ends if end.exit_code), ""),
        saves=saves,
        hosts_lost=tuple(each.loss for each in losses),
        recovery=_distributions(restarts),
        restart_causes=describe_restarts(
            RestartCount.of(what_happened(restart), _place(restart)[0])
            for restart in restarts
            if restart.resumed
        ),
        causes=_count_causes(restarts),
        host_counts=_count_hosts(restarts),
        injected=injected,
        no_restart=tuple(sorted(no_restart)),
        no_end=bool(run.all(ev.WorkerStarted)) and not ends,
        timeline=timeline_of(
            run,
            course,
            reference="" if longest is None else longest.host,
            restarts=restarts,
            saves=saves,
            injected=injected,
            losses=[each.loss for each in losses],
        ),
        mismatches=_mismatches(run),
        stragglers=tuple(
            record(Straggler, e, rank=e.straggler) for e in run.all(ev.StragglerFound)
        ),
        skips=tuple(record(Skip, e) for e in run.all(ev.BatchesSkipped)),
        step_cpu=_step_cpu(run),
    )


def _step_cpu(run: Run) -> tuple[StepCpu, ...]:
    before: dict[tuple[str, int], ev.StepsDone] = {}
    done: dict[tuple[int, str], tuple[int, float]] = {}
    for event in run.all(ev.StepsDone):
        # A record is of all steps since the last restore, and may include the record before it.
        last = before.get((event.host, event.pid), event)
        again = last is event or last.first != event.first or last.cpu_seconds > event.cpu_seconds
        steps = event.last - (event.first if again else last.last)
        cpu = event.cpu_seconds - (0.0 if again else last.cpu_seconds)
        total = done.get(rank := (event.rank, event.host), (0, 0.0))
        done[rank] = total[0] + steps, total[1] + cpu
        before[event.host, event.pid] = event
    found = [
        StepCpu(rank=rank, host=host, steps=steps, seconds=cpu / steps)
        for (rank, host), (steps, cpu) in done.items()
        if steps > 0 and cpu > 0
    ]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def distribution(seconds: Sequence[float]) -> Distribution:
    """The percentiles by nearest rank; there must be at least one value."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    known = p99 if len(ordered) >= _PERCENTILES_FROM else None
    return Distribution(count=len(ordered), p50=p50, p99=known, worst=ordered[-1])


def _distributions(restarts: Iterable[Restart]) -> dict[str, Distribution]:
    """The percentiles of each part over the restarts after which the ranks continued."""
    resumed = [restart for restart in restarts if restart.resumed]
    recoveries = [vars(restart.recovery) for restart in resumed if restart.recovery is not None]
    values = {BACK: [r.phases.total for r in resumed if r.phases.total is not None]}
    for field in dataclasses.fields(Recovery):
        if field.name != "host":
            values[field.name] = [recovery[field.name] for recovery in recoveries]
    return {name: distribution(seconds) for name, seconds in values.items() if any(seconds)}


def _recoveries(accounts: Iterable[HostAccount]) -> dict[tuple[int, int], list[Recovery]]:
    """What each host (with survivors, if any) spent a restart on, by call and iteration."""
    found: dict[tuple[int, int], list[Recovery]] = {}
    of_lost: dict[tuple[int, int], list[Recovery]] = {}
    for stretch, recovery in (each for account in accounts for each in account.recoveries()):
        kept = of_lost if stretch.host_lost else found
        kept.setdefault((stretch.call, stretch.iteration), []).append(recovery)
    return {**of_lost, **found}


def _recovery_of(
    restart: Restart, recoveries: Mapping[tuple[int, int], Sequence[Recovery]]
) -> Recovery | None:
    """That of the host of the fault; of the slowest host if that one has none."""
    hosts = recoveries.get((restart.call, restart.iteration), ())
    fault = "" if restart.cause is None else restart.cause.host
    slowest = max(hosts, key=lambda each: each.total, default=None)
    return next((each for each in hosts if each.host == fault), slowest)


def _place(restart: Restart) -> tuple[int, str]:
    """Rank and host of the first cause; -1 and an empty text if there is none."""
    if restart.host_loss is not None:
        return -1, restart.host_loss.name
    ranked = restart.cause or next(iter(restart.lost), None)
    return (-1, "") if ranked is None else (ranked.rank, ranked.host)


def _count_causes(restarts: Sequence[Restart]) -> tuple[CauseCount, ...]:
    """The kinds of first causes, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for number, restart in enumerate(restarts):
        groups.setdefault(what_happened(restart), []).append(number)
    counts = []
    for what, numbers in groups.items():
        group = [restarts[number] for number in numbers]
        known = [r.redone_steps for r in group if r.redone_steps is not None]
        places = (
            host if rank < 0 else f"rank {rank} on {host}" for rank, host in map(_place, group)
        )
        count = CauseCount(
            what=what,
            count=len(group),
            where=tuple(Counter(filter(None, places)).most_common()),
            recovery_seconds=sum(restart.phases.total or 0.0 for restart in group),
            redone_steps=sum(known) if len(known) == len(group) else None,
            restarts=tuple(numbers),
        )
        counts.append(count)
    return tuple(sorted(counts, key=lambda count: -count.count))


def _count_hosts(restarts: Iterable[Restart]) -> tuple[HostCount, ...]:
    """The hosts of first causes, the most frequent first."""
    found: dict[str, Counter[str]] = {}
    for restart in restarts:
        if host := _place(restart)[1]:
            found.setdefault(host, Counter())[what_happened(restart)] += 1
    counts = [
        HostCount(host=host, count=kinds.total(), causes=tuple(kinds.most_common()))
        for host, kinds in found.items()
    ]
    return tuple(sorted(counts, key=lambda count: (-count.count, count.host)))


def _stop(run: Run) -> Stop | None:
    """The first request to stop; `None` if there was none."""
    requests = run.all(ev.StopRequested)
    if not requests:
        return None
    # The launcher's request comes before those of the ranks, to which it is forwarded.
    first = min(requests, key=lambda event: (event.rank >= 0, event.time, event.rank))
    ends = {
        event.rank: exit_summary(event.exit_code)
        for event in run.all(ev.WorkerExited, host=first.host)
        if event.time >= first.time
    }
    exits = tuple(f"rank {rank} ({text})" for rank, text in sorted(ends.items()))
    return record(Stop, first, exits=exits)


def _injected(run: Run) -> tuple[InjectedFault, ...]:
    """The planned faults, each once: every launcher writes those that it knows of."""
    found: dict[str, InjectedFault] = {}
    for event in run.all(ev.PlannedFault):
        if event.fired or event.key not in found:
            found[event.key] = record(InjectedFault, event, kind=event.name)
    return tuple(found.values())


def _mismatches(run: Run) -> tuple[Mismatch, ...]:
    """Each set of ranks that differed, at the first check that found it."""
    found: dict[tuple[int, ...], Mismatch] = {}
    for event in run.all(ev.ReplicaMismatch):
        ranks = tuple(event.ranks)
        if before := found.get(ranks):
            found[ranks] = dataclasses.replace(before, checks=before.checks + 1)
        else:
            lists = {"hosts": tuple(event.hosts), "parameters": tuple(event.parameters)}
            found[ranks] = record(Mismatch, event, ranks=ranks, checks=1, **lists)
    return tuple(found.values())
