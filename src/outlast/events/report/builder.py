"""Builds the report from the events of a run."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from outlast.events.report.call_history import CallHistory, exits_of
from outlast.events.report.log_reader import TORN_LINE
from outlast.events.report.model import HostTime, Party, Report, Restart, Saves
from outlast.events.report.phases import measure_phases, productive_time
from outlast.events.report.split_calls import split_calls
from outlast.events.types import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRestored,
    Completed,
    Entered,
    Event,
    InterruptSwallowed,
    Joined,
    MonitorRestarted,
    Note,
    Seen,
)


def build(events: Iterable[Event]) -> Report:
    """Builds the report; the events of one process must be in the order in which it wrote them."""
    events = list(events)
    notes = [event for event in events if isinstance(event, Note)]
    torn = sorted(str(note.data.get("file", "")) for note in notes if note.name == TORN_LINE)
    events = [e for e in events if not (isinstance(e, Note) and e.name == TORN_LINE)]
    origins: dict[str, float] = {}
    for event in events:
        origins[event.host] = min(event.time, origins.get(event.host, event.time))
    exits = exits_of(events)
    calls = [CallHistory(i, part, origins, exits) for i, part in enumerate(split_calls(events))]
    restarts = tuple(restart for call in calls for restart in _restarts(call))
    hosts = _hosts(calls)
    wall = sum(host.wall_seconds for host in hosts)
    productive = sum(host.productive_seconds for host in hosts)
    lost = sum(len(restart.lost) for restart in restarts)
    joined = sum(len(restart.joined) for restart in restarts)
    return Report(
        events=len(events),
        calls=len(calls),
        hosts=hosts,
        world_size=max((call.world_size(k) for call in calls for k in call.views), default=0),
        restarts=restarts,
        lost=lost,
        joined=joined,
        replaced=min(lost, joined),
        recovery_seconds=sum(restart.phases.total or 0.0 for restart in restarts),
        goodput=productive / wall if wall > 0 else None,
        waiting=_waiting(calls),
        completed=len({e.member for e in calls[-1].events if isinstance(e, Completed)}),
        monitors_restarted=sum(isinstance(event, MonitorRestarted) for event in events),
        notes=dict(sorted(Counter(n.name for n in notes if n.name != TORN_LINE).items())),
        torn_logs=tuple(torn),
        saves=_summarize_saves(events),
    )


def _restarts(call: CallHistory) -> list[Restart]:
    found = []
    for iteration in call.iterations():
        faults = call.faults(iteration)
        seen = [event for event in call.during(iteration) if isinstance(event, Seen)]
        if not faults and not seen and iteration + 1 not in call.views:
            continue
        moment = next(iter((*faults, *seen, *call.views.get(iteration + 1, {}).values())))
        causes = [call.cause(fault) for fault in faults]
        joined, lost = call.joined(iteration), call.lost(iteration)
        if joined and not lost and all(cause.consequence for cause in causes):
            causes = []  # no rank failed: connections broke because the job grew
        found.append(
            Restart(
                call=call.number,
                iteration=iteration,
                at=call.at(moment),
                cause=causes[0] if causes else None,
                others=tuple(causes[1:]),
                reason=seen[0].reason if seen else "",
                phases=measure_phases(call, iteration, faults[0] if faults else None),
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


def _hosts(calls: Sequence[CallHistory]) -> tuple[HostTime, ...]:
    wall: dict[str, float] = defaultdict(float)
    productive: dict[str, float] = defaultdict(float)
    for call in calls:
        for host, (wall_s, productive_s) in productive_time(call).items():
            wall[host] += wall_s
            productive[host] += productive_s
    return tuple(
        HostTime(
            host=host,
            wall_seconds=wall_s,
            productive_seconds=productive[host],
            goodput=productive[host] / wall_s if wall_s > 0 else None,
        )
        for host, wall_s in sorted(wall.items())
    )


def _waiting(calls: Sequence[CallHistory]) -> tuple[Party, ...]:
    placed = {member for call in calls for view in call.views.values() for member in view}
    return tuple(
        Party(rank=event.preferred_rank, member=event.member, host=event.host)
        for call in calls
        for event in call.events
        if isinstance(event, Joined) and event.member not in placed
    )


def _summarize_saves(events: Iterable[Event]) -> Saves | None:
    """The checkpoints in an event log; `None` if there are no checkpoint events."""
    own = [event for event in events if event.rank == 0]
    done = [event for event in own if isinstance(event, CheckpointCommitted)]
    failed = [event for event in own if isinstance(event, CheckpointFailed)]
    restored = [event for event in own if isinstance(event, CheckpointRestored)]
    skipped = [event for event in own if isinstance(event, CheckpointPassedOver)]
    if not (done or failed or restored or skipped):
        return None
    return Saves(
        committed=len(done),
        size_bytes=max(done, key=lambda e: e.time).size_bytes if done else 0,
        blocked_median=statistics.median(e.blocked_seconds for e in done) if done else 0.0,
        blocked_worst=max((e.blocked_seconds for e in done), default=0.0),
        durable_median=statistics.median(e.seconds for e in done) if done else 0.0,
        failed=tuple((e.step, e.cause) for e in failed),
        restored=tuple((e.step, e.source) for e in restored),
        passed_over=tuple((e.step, e.cause) for e in skipped),
    )
