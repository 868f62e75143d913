"""The course of a run: its iterations, and on each host the productive part of each, in which all
active ranks are in the function.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import outlast.events as ev
from outlast.events.report.figures.calls import Call
from outlast.events.report.figures.intervals import Interval
from outlast.events.report.model import Restart

_HUNG = ("SOFT_TIMEOUT", "HARD_TIMEOUT", "UNRESPONSIVE")
_FOREVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """One iteration on one host: the time in which all its active ranks were in the function.

    Attributes:
        size: the share of ranks that were active, of the largest number so far.
        hung_from: the last progress of hung ranks; infinity if no rank hung.
        host_lost: whether all ranks of the host were lost at its end.
        call, iteration: those of the function; without `Wrapper`, the number of the round.
    """

    start: float
    end: float
    size: float = 1.0
    hung_from: float = _FOREVER
    host_lost: bool = False
    call: int = 0
    iteration: int = 0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A restart, the position of the segment that it ended, and the hosts whose members were all
    lost in it.
    """

    restart: Restart
    place: int
    gone: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a run, from the wrapper's events or from those of the launcher alone.

    Attributes:
        segments: when each iteration (or round of processes) began, by host.
        walls: the wall time of each host, for each call.
    """

    source: str
    world_size: int
    ended: Sequence[Ended]
    completed: int
    segments: Sequence[dict[str, float]]
    stretches: dict[str, list[Stretch]]
    walls: dict[str, list[Interval]]


def course_of_calls(calls: Sequence[Call], source: str) -> Course:
    """The course of a run whose script uses `Wrapper`, or of which little is known."""
    iterations = [(call, k) for call in calls for k in call.iterations()]
    places = {(call.number, k): place for place, (call, k) in enumerate(iterations)}
    stretches: dict[str, list[Stretch]] = defaultdict(list)
    walls: dict[str, list[Interval]] = defaultdict(list)
    for call in calls:
        _add_stretches(call, stretches)
        for host, wall in call.walls().items():
            walls[host].append(wall)
    return Course(
        source=source,
        world_size=max((call.world_size(k) for call, k in iterations), default=0),
        ended=[
            Ended(restart, places[call.number, restart.iteration], gone)
            for call in calls
            for restart in call.restarts()
            for gone in [call.lost_hosts(restart.iteration)]
        ],
        completed=len(calls[-1].completed),
        segments=[call.begins(k) for call, k in iterations],
        stretches=stretches,
        walls=walls,
    )


def _add_stretches(call: Call, found: dict[str, list[Stretch]]) -> None:
    ends, largest = call.ends(), 0
    for iteration in sorted(call.views):
        view = call.views[iteration]
        sizes = [e.active_world_size for e in view.values() if isinstance(e, ev.Assigned)]
        active = max(sizes, default=0) or len(view)
        largest = max(largest, active)
        hung = [fault for fault in call.faults(iteration) if fault.interruption in _HUNG]
        lost_hosts = call.lost_hosts(iteration)
        by_host: dict[str, list[ev.Event]] = defaultdict(list)
        for event in call.during(iteration):
            if event.member in view:
                by_host[event.host].append(event)
        for host, here in by_host.items():
            if not any(isinstance(event, ev.Entered) for event in here):
                continue
            lost = host in lost_hosts
            last = _last_sign(call, iteration, host) if lost else ends[host]
            start, end = _time_in_function(here, last)
            since, size = _hung_from(hung, host, end), active / max(largest, 1)
            stretch = Stretch(start, end, size, since, lost, call.number, iteration)
            found[host].append(stretch)


def _last_sign(call: Call, iteration: int, host: str) -> float:
    """The last event of the host's ranks. Nothing records the moment at which a host is lost, and a
    fresh host of the same name may have the same process IDs: its events come after its joining.
    """
    view = call.views[iteration]
    processes = {(e.host, e.pid) for e in view.values() if e.host == host}
    entered = max(e.time for e in view.values() if e.host == host)
    until = min(
        (
            event.time
            for event in call.events
            if event.host == host and event.member >= 0 and event.member not in view
            if event.time > entered
        ),
        default=_FOREVER,
    )
    own = [e.time for e in call.events if (e.host, e.pid) in processes and e.time < until]
    return max(own, default=entered)


def _time_in_function(here: Sequence[ev.Event], end: float) -> Interval:
    """From the entry of the host's last active rank until the host learns of the end of the
    iteration or an active rank leaves the function; `end` is the host's last event in the call.
    """
    entered = [event for event in here if isinstance(event, ev.Entered)]
    working = [event for event in entered if event.active] or entered
    members = {event.member for event in working}
    stops = [
        event.time
        for event in here
        if isinstance(event, ev.Fault | ev.Seen | ev.Lost)
        or (isinstance(event, ev.LeftFunction) and event.member in members)
    ]
    start = max(event.time for event in working)
    return start, max(start, min(stops, default=end))


def _hung_from(hung: Sequence[ev.Fault], host: str, end: float) -> float:
    """When the hung ranks made their last progress. On a host without a hung rank the time was
    lost too, in the wait for one; clocks of hosts are not compared, so only its length is known.
    """
    here = [fault.time - fault.idle for fault in hung if fault.host == host and fault.idle > 0]
    anywhere = [end - fault.idle for fault in hung if fault.idle > 0]
    return max(here or anywhere, default=_FOREVER)
