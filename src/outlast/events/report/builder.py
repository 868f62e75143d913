"""Builds the report from the events of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.errors import NO_RESTART
from outlast.events import (
    Completed,
    Entered,
    Event,
    InterruptSwallowed,
    Joined,
    LauncherEnded,
    MonitorRestarted,
    Note,
    PlannedFault,
    Seen,
    WorkerExited,
    WorkerStarted,
)
from outlast.events.report.figures.causes import count_causes, count_hosts, restarts_in_words
from outlast.events.report.figures.goodput import measure
from outlast.events.report.figures.phases import measure_phases
from outlast.events.report.figures.recoveries import distributions, recoveries_of, recovery_of
from outlast.events.report.figures.redone_steps import any_restored, redone_steps
from outlast.events.report.figures.saves import summarize_saves
from outlast.events.report.figures.silent_faults import find_mismatches, find_stragglers
from outlast.events.report.figures.timeline import timeline_of
from outlast.events.report.history.call_history import CallHistory, exits_of, launcher_ranks_of
from outlast.events.report.history.host_losses import (
    find_losses,
    name_lost_hosts,
    waits_for_lost_hosts,
)
from outlast.events.report.history.lanes import lanes_of
from outlast.events.report.history.launcher_history import LauncherHistory
from outlast.events.report.history.split_calls import split_calls
from outlast.events.report.history.stops import ended_by_stop, find_stop
from outlast.events.report.history.stretches import Stretch, stretches_of
from outlast.events.report.intervals import Interval
from outlast.events.report.log_reader import TORN_LINE
from outlast.events.report.model import InjectedFault, Party, Report, Restart


@dataclasses.dataclass(frozen=True)
class _Course:
    """The course of a run, from the wrapper's events or from those of the launcher alone.

    Attributes:
        segments: when each iteration (or round of processes) began, by host.
        numbers: the position of each restart's iteration in `segments`.
        gone: for each restart, the hosts whose members were all lost in it.
    """

    source: str
    world_size: int
    restarts: Sequence[Restart]
    completed: int
    segments: Sequence[Mapping[str, float]]
    numbers: Sequence[int]
    gone: Sequence[frozenset[str]]
    stretches: dict[str, list[Stretch]]
    walls: dict[str, list[Interval]]


def build(events: Iterable[Event]) -> Report:
    """Builds the report; the events of one process must be in the order in which it wrote them."""
    events = list(events)
    notes = [event for event in events if isinstance(event, Note)]
    torn = sorted(str(note.data.get("file", "")) for note in notes if note.name == TORN_LINE)
    events = [e for e in events if not (isinstance(e, Note) and e.name == TORN_LINE)]
    origins: dict[str, float] = {}
    for event in events:
        origins[event.host] = min(event.time, origins.get(event.host, event.time))
    exits, ranks = exits_of(events), launcher_ranks_of(events)
    parts = split_calls(events)
    calls = [CallHistory(i, part, origins, exits, ranks) for i, part in enumerate(parts)]
    launcher = LauncherHistory(events)
    wrapped = any(call.views for call in calls) or not launcher.rounds
    course = _course_of_calls(calls, events) if wrapped else _course_of_launcher(launcher, events)
    counts, steps_from = redone_steps(course.segments, events)
    losses = find_losses(events, origins)
    named = name_lost_hosts(course.restarts, course.numbers, course.segments, course.gone, losses)
    stretches = waits_for_lost_hosts(course.stretches, course.restarts, named)
    recoveries = recoveries_of(stretches, events)
    restarts = tuple(
        dataclasses.replace(
            restart,
            redone_steps=counts[number],
            host_loss=None if loss is None else loss.loss,
            recovery=recovery_of(restart, recoveries) if restart.resumed else None,
        )
        for restart, number, loss in zip(course.restarts, course.numbers, named, strict=True)
    )
    hosts = measure(stretches, course.walls, events)
    longest = max(hosts, key=lambda host: host.wall_seconds, default=None)
    stop, saves = find_stop(events, origins), summarize_saves(events, origins)
    injected = _injected(events, origins)
    tracks = lanes_of(events, ranks, wrapped, stopped=stop is not None)
    lost = sum(len(restart.lost) for restart in restarts)
    joined = sum(len(restart.joined) for restart in restarts)
    return Report(
        source=course.source,
        events=len(events),
        calls=len(calls),
        hosts=hosts,
        world_size=course.world_size,
        restarts=restarts,
        lost=lost,
        joined=joined,
        replaced=min(lost, joined),
        recovery_seconds=sum(restart.phases.total or 0.0 for restart in restarts),
        goodput=None if longest is None else longest.goodput,
        redone_steps=_sum([restart.redone_steps for restart in restarts if restart.resumed]),
        steps_from=steps_from,
        redone_known=any_restored(course.segments, events),
        stop=stop,
        waiting=_waiting(calls),
        completed=course.completed,
        monitors_restarted=sum(isinstance(event, MonitorRestarted) for event in events),
        notes=dict(sorted(Counter(n.name for n in notes if n.name != TORN_LINE).items())),
        torn_logs=tuple(torn),
        saves=saves,
        no_end=any(isinstance(event, WorkerStarted) for event in events)
        and not any(isinstance(event, LauncherEnded) for event in events),
        hosts_lost=tuple(each.loss for each in losses),
        recovery=distributions(restarts),
        restart_causes=restarts_in_words(restarts),
        causes=count_causes(restarts),
        host_counts=count_hosts(restarts),
        injected=injected,
        mismatches=find_mismatches(events, origins),
        stragglers=find_stragglers(events, origins),
        no_restart=tuple(
            sorted(
                event.rank
                for event in events
                if isinstance(event, WorkerExited) and event.exit_code == NO_RESTART
            )
        ),
        timeline=timeline_of(
            tracks,
            events,
            origins,
            course.segments,
            reference="" if longest is None else longest.host,
            restarts=restarts,
            saves=saves,
            injected=injected,
            losses=[each.loss for each in losses],
        ),
    )


def _course_of_calls(calls: Sequence[CallHistory], events: Sequence[Event]) -> _Course:
    iterations = [(call, k) for call in calls for k in call.iterations()]
    places = {(call.number, k): place for place, (call, k) in enumerate(iterations)}
    restarts = [
        restart
        for call in calls
        for restart in _restarts(call)
        if not ended_by_stop(call, restart.iteration, events)
    ]
    stretches: dict[str, list[Stretch]] = defaultdict(list)
    walls: dict[str, list[Interval]] = defaultdict(list)
    for call in calls:
        for host, found in stretches_of(call).items():
            stretches[host] += found
        for host, wall in call.walls().items():
            walls[host].append(wall)
    wrapped = any(event.member >= 0 for event in events)
    return _Course(
        source="wrapper" if wrapped or not events else "checkpoints",
        world_size=max((call.world_size(k) for call, k in iterations), default=0),
        restarts=restarts,
        completed=len({e.member for e in calls[-1].events if isinstance(e, Completed)}),
        segments=[call.begins(k) for call, k in iterations],
        numbers=[places[restart.call, restart.iteration] for restart in restarts],
        gone=[calls[restart.call].lost_hosts(restart.iteration) for restart in restarts],
        stretches=stretches,
        walls=walls,
    )


def _course_of_launcher(launcher: LauncherHistory, events: Sequence[Event]) -> _Course:
    restarts = launcher.restarts(stopped=find_stop(events, {}) is not None)
    return _Course(
        source="launcher",
        world_size=launcher.world_size,
        restarts=restarts,
        completed=launcher.completed,
        segments=launcher.segments(),
        numbers=[restart.iteration for restart in restarts],
        gone=[frozenset() for _ in restarts],
        stretches=launcher.stretches(),
        walls=launcher.walls(),
    )


def _restarts(call: CallHistory) -> list[Restart]:
    found = []
    for iteration in call.iterations():
        faults = call.faults(iteration)
        seen = [event for event in call.during(iteration) if isinstance(event, Seen)]
        if not faults and not seen and iteration + 1 not in call.views:
            continue
        # An overtaken exception is recorded at the end of the interrupt, not when it was raised.
        first = next((fault for fault in faults if not fault.overtaken), None)
        moment = next(
            iter((*filter(None, [first]), *seen, *call.views.get(iteration + 1, {}).values()))
        )
        causes = [call.cause(fault) for fault in faults]
        joined, lost = call.joined(iteration), call.lost(iteration)
        if joined and not lost and all(cause.may_be_harmless for cause in causes):
            causes = []  # no rank failed: connections broke because the job grew
        found.append(
            Restart(
                call=call.number,
                iteration=iteration,
                at=call.at(moment),
                cause=causes[0] if causes else None,
                others=tuple(causes[1:]),
                reason=seen[0].reason if seen else "",
                phases=measure_phases(call, iteration, first if causes else None),
                lost=lost,
                joined=joined,
                world_size_before=call.world_size(iteration),
                world_size_after=call.world_size(iteration + 1),
                resumed=any(isinstance(e, Entered) for e in call.during(iteration + 1)),
                swallowed=tuple(
                    e.where for e in call.during(iteration) if isinstance(e, InterruptSwallowed)
                ),
            )
        )
    return found


def _injected(events: Iterable[Event], origins: Mapping[str, float]) -> tuple[InjectedFault, ...]:
    """The planned faults, each once: every launcher writes those that it knows of."""
    found: dict[str, InjectedFault] = {}
    for event in events:
        if isinstance(event, PlannedFault) and (event.fired or event.key not in found):
            found[event.key] = InjectedFault(
                key=event.key,
                kind=event.name,
                rank=event.rank,
                due=event.due,
                fired=event.fired,
                host=event.host,
                at=event.time - origins[event.host],
            )
    return tuple(found.values())


def _waiting(calls: Sequence[CallHistory]) -> tuple[Party, ...]:
    placed = {member for call in calls for view in call.views.values() for member in view}
    return tuple(
        Party(rank=event.preferred_rank, member=event.member, host=event.host)
        for call in calls
        for event in call.events
        if isinstance(event, Joined) and event.member not in placed
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum; `None` if one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
