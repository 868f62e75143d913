"""The story of a run, from its event logs: what failed, what each restart took, what was lost.

    events = load("build/demo")          # a JSONL file a process; of the newest run there
    report = build(events)               # dataclasses, see `report/model.py`
    print(to_json(report))
    render(Path("build/demo"), Console())

`build` is pure: the same events, in any order of files, give the same report. It holds to two
rules. Times of different hosts are never compared: detection and the total of a restart are
measured on the host of the fault. And a fault that looks like the echo of another is never the
first cause while there is another: a killed rank leaves broken connections, and its peers fail of
those before its monitor has said a word.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Console

from outlast.events.report.call import Call, exits_of
from outlast.events.report.checkpoints import saves_in
from outlast.events.report.log_reader import TORN_LINE, load
from outlast.events.report.model import Cause, HostTime, Party, Phases, Report, Restart
from outlast.events.report.phases import measure_phases, productive_time
from outlast.events.report.render import render_report
from outlast.events.report.split_calls import split_calls
from outlast.events.types import (
    Completed,
    Entered,
    Event,
    InterruptSwallowed,
    Joined,
    MonitorRestarted,
    Note,
    Seen,
)

__all__ = [
    "Cause",
    "HostTime",
    "Party",
    "Phases",
    "Report",
    "Restart",
    "build",
    "load",
    "render",
    "to_json",
]


def build(events: Iterable[Event]) -> Report:
    """The report that `events` make; those of one process in the order it wrote them."""
    events = list(events)
    notes = [event for event in events if isinstance(event, Note)]
    torn = sorted(str(note.data.get("file", "")) for note in notes if note.name == TORN_LINE)
    events = [e for e in events if not (isinstance(e, Note) and e.name == TORN_LINE)]
    origins: dict[str, float] = {}
    for event in events:
        origins[event.host] = min(event.time, origins.get(event.host, event.time))
    exits = exits_of(events)
    calls = [Call(i, part, origins, exits) for i, part in enumerate(split_calls(events))]
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
        saves=saves_in(events),
    )


def to_json(report: Report) -> str:
    """The report as a JSON object; its fields are those of the dataclasses."""
    return json.dumps(dataclasses.asdict(report), indent=2)


def render(directory: str | os.PathLike[str], console: Console) -> None:
    """Reads the logs of the newest run in `directory` and prints their report.

    Raises:
        EventLogError: see `load`.
    """
    render_report(build(load(directory)), console)


def _restarts(call: Call) -> list[Restart]:
    found = []
    for iteration in call.iterations():
        faults = call.faults(iteration)
        seen = [event for event in call.during(iteration) if isinstance(event, Seen)]
        if not faults and not seen and iteration + 1 not in call.views:
            continue
        moment = faults[0] if faults else (seen[0] if seen else _first_of(call, iteration + 1))
        causes = [call.cause(fault) for fault in faults]
        joined, lost = call.joined(iteration), call.lost(iteration)
        if joined and not lost and all(cause.consequence for cause in causes):
            causes = []  # nobody failed: what broke, broke because the job was made to grow
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
                    event.where
                    for event in call.during(iteration)
                    if isinstance(event, InterruptSwallowed)
                ),
            )
        )
    return found


def _first_of(call: Call, iteration: int) -> Event:
    return next(iter(call.views[iteration].values()))


def _hosts(calls: Sequence[Call]) -> tuple[HostTime, ...]:
    wall: dict[str, float] = defaultdict(float)
    productive: dict[str, float] = defaultdict(float)
    for call in calls:
        for host, (whole, part) in productive_time(call).items():
            wall[host] += whole
            productive[host] += part
    return tuple(
        HostTime(
            host=host,
            wall_seconds=wall[host],
            productive_seconds=productive[host],
            goodput=productive[host] / wall[host] if wall[host] > 0 else None,
        )
        for host in sorted(wall)
    )


def _waiting(calls: Sequence[Call]) -> tuple[Party, ...]:
    placed = {member for call in calls for view in call.views.values() for member in view}
    return tuple(
        Party(rank=event.preferred_rank, member=event.member, host=event.host)
        for call in calls
        for event in call.events
        if isinstance(event, Joined) and event.member not in placed
    )
