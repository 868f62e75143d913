"""The productive part of each iteration on each host: all active ranks are in the function."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from outlast.events import Assigned, Entered, Event, Fault, LeftFunction, Lost, Seen
from outlast.events.report.history.call_history import CallHistory
from outlast.events.report.intervals import Interval

_HUNG = ("SOFT_TIMEOUT", "HARD_TIMEOUT", "UNRESPONSIVE")


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
    hung_from: float = float("inf")
    host_lost: bool = False
    call: int = 0
    iteration: int = 0


def stretches_of(call: CallHistory) -> dict[str, list[Stretch]]:
    """The iterations of a call of a wrapped function, by host."""
    found: dict[str, list[Stretch]] = defaultdict(list)
    ends = call.ends()
    largest = 0
    for iteration in sorted(call.views):
        active = _active_ranks(call, iteration)
        largest = max(largest, active)
        hung = [fault for fault in call.faults(iteration) if fault.interruption in _HUNG]
        view = call.views[iteration]
        own = [event for event in call.during(iteration) if event.member in view]
        lost_hosts = call.lost_hosts(iteration)
        for host in {event.host for event in own if isinstance(event, Entered)}:
            here = [event for event in own if event.host == host]
            lost = host in lost_hosts
            last = _last_sign(call, iteration, host) if lost else ends[host]
            start, end = _time_in_function(here, last)
            found[host].append(
                Stretch(
                    start,
                    end,
                    active / max(largest, 1),
                    _hung_from(hung, host, end),
                    host_lost=lost,
                    call=call.number,
                    iteration=iteration,
                )
            )
    return found


def _last_sign(call: CallHistory, iteration: int, host: str) -> float:
    """The last event of the host's ranks. Nothing records the moment at which a host is lost, and a
    fresh host of the same name may have the same process IDs: its events come after its joining.
    """
    view = call.views[iteration]
    processes = {(e.host, e.pid) for e in view.values() if e.host == host}
    entered = max(e.time for e in view.values() if e.host == host)
    fresh = [
        event.time
        for event in call.events
        if event.host == host and event.member >= 0 and event.member not in view
    ]
    until = min((time for time in fresh if time > entered), default=float("inf"))
    own = [e.time for e in call.events if (e.host, e.pid) in processes and e.time < until]
    return max(own, default=entered)


def _active_ranks(call: CallHistory, iteration: int) -> int:
    view = call.views[iteration].values()
    sizes = [event.active_world_size for event in view if isinstance(event, Assigned)]
    return max(sizes, default=0) or len(view)


def _time_in_function(here: Sequence[Event], end: float) -> Interval:
    """From the entry of the host's last active rank until the host learns of the end of the
    iteration or an active rank leaves the function; `end` is the host's last event in the call.
    """
    entered = [event for event in here if isinstance(event, Entered)]
    working = [event for event in entered if event.active] or entered
    members = {event.member for event in working}
    stops = [
        event.time
        for event in here
        if isinstance(event, Fault | Seen | Lost)
        or (isinstance(event, LeftFunction) and event.member in members)
    ]
    start = max(event.time for event in working)
    return start, max(start, min(stops, default=end))


def _hung_from(hung: Sequence[Fault], host: str, end: float) -> float:
    """When the hung ranks made their last progress. On a host without a hung rank the time was
    lost too, in the wait for one; clocks of hosts are not compared, so only its length is known.
    """
    here = [fault.time - fault.idle for fault in hung if fault.host == host and fault.idle > 0]
    anywhere = [end - fault.idle for fault in hung if fault.idle > 0]
    return max(here or anywhere, default=float("inf"))
