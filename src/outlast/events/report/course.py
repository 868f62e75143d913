"""The course of a run: its iterations, on each host the productive part of each, in which all
active ranks are in the function, and the restarts that the loss of a host caused.

Without `Wrapper`, only what the launcher saw is known, which restarts all processes together: a
*round* is what it started together, and is reported like an iteration.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import outlast.events.types as ev
from outlast.events.event import Event, Record
from outlast.events.report.calls import NO_PROGRESS, Call
from outlast.events.report.intervals import FOREVER, Interval, Stretch
from outlast.events.report.model import Cause, HostLoss, Phases, Restart
from outlast.events.report.run import Process, Run, record
from outlast.events.restart_causes import Interruption
from outlast.system.error_text import exit_summary


class Ended(Record):
    """A restart, the position of the segment that it ended, and the hosts that lost all members."""

    restart: Restart
    place: int
    gone: frozenset[str] = frozenset()


class Course(Record):
    """The course of a run."""

    source: str
    world_size: int
    ended: Sequence[Ended]
    completed: int
    # when each iteration (or round of processes) began, by host
    segments: Sequence[dict[str, float]]
    stretches: dict[str, list[Stretch]]
    walls: dict[str, list[Interval]]  # the wall time of each host, for each call


def course_of(run: Run, calls: Sequence[Call]) -> Course:
    """The course, from the wrapper's events or else from those of the launcher alone."""
    rounds = _rounds(run)
    if rounds and not any(call.views for call in calls):
        return _course_of_rounds(rounds, stopped=bool(run.stops))
    iterations = [(call, k) for call in calls for k in call.iterations]
    places = {(call.number, k): place for place, (call, k) in enumerate(iterations)}
    stretches: dict[str, list[Stretch]] = defaultdict(list)
    walls: dict[str, list[Interval]] = defaultdict(list)
    for call in calls:
        _add_stretches(call, stretches)
        for host, wall in call.walls().items():
            walls[host].append(wall)
    members = any(event.member >= 0 for event in run.events)
    return Course(
        source="wrapper" if members or not run.events else "checkpoints",
        world_size=max((call.world_size(k) for call, k in iterations), default=0),
        ended=[
            Ended(
                restart=restart,
                place=places[call.number, restart.iteration],
                gone=call.lost_hosts(restart.iteration),
            )
            for call in calls
            for restart in call.restarts()
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
        hung = [fault for fault in call.faults(iteration) if fault.interruption in NO_PROGRESS]
        lost_hosts = call.lost_hosts(iteration)
        by_host: dict[str, list[Event]] = defaultdict(list)
        for event in call.during[iteration]:
            if event.member in view:
                by_host[event.host].append(event)
        for host, here in by_host.items():
            if not any(isinstance(event, ev.Entered) for event in here):
                continue
            lost = host in lost_hosts
            last = _last_sign(call, iteration, host) if lost else ends[host]
            start, end = _time_in_function(here, last)
            stretch = Stretch(
                start=start,
                end=end,
                size=active / max(largest, 1),
                hung_from=_hung_from(hung, host, end),
                host_lost=lost,
                call=call.number,
                iteration=iteration,
            )
            found[host].append(stretch)


def _last_sign(call: Call, iteration: int, host: str) -> float:
    """The last event of the host's ranks. Nothing records the moment at which a host is lost, and a
    fresh host of the same name may have the same process IDs: its events come after its joining.
    """
    view = call.views[iteration]
    processes = {(e.host, e.pid) for e in view.values() if e.host == host}
    entered = max(e.time for e in view.values() if e.host == host)
    joined = (
        event.time
        for event in call.events
        if event.host == host and event.member >= 0 and event.member not in view
        if event.time > entered
    )
    until = min(joined, default=FOREVER)
    own = [e.time for e in call.events if (e.host, e.pid) in processes and e.time < until]
    return max(own, default=entered)


def _time_in_function(here: Sequence[Event], end: float) -> Interval:
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
    return max(here or anywhere, default=FOREVER)


class _Round:
    """The processes that one launcher started together; `last` is the last event of the host."""

    def __init__(self, last: float) -> None:
        self.last = last
        self.started: list[ev.WorkerStarted] = []
        self.exited: list[ev.WorkerExited] = []
        self.failed: list[ev.WorkerFailed] = []

    @property
    def start(self) -> float:
        """When the last process was started."""
        return self.started[-1].time

    @property
    def end(self) -> float:
        """When the first process failed, or the last one ended, or the log did."""
        failures = [event.time for event in self.exited if event.exit_code != 0]
        ends = [event.time for event in self.exited]
        return max(self.start, min(failures, default=max(ends, default=self.last)))


def _rounds(run: Run) -> dict[str, list[_Round]]:
    """The rounds of each launcher's host, in order."""
    found: dict[str, dict[int, _Round]] = defaultdict(dict)
    processes: dict[Process, _Round] = {}
    for event in run.all(ev.WorkerStarted, ev.WorkerExited, ev.WorkerFailed):
        if isinstance(event, ev.WorkerStarted):
            one = found[event.host].setdefault(event.attempt, _Round(run.ends[event.host]))
            one.started.append(event)
            processes[event.host, event.worker_pid] = one
        elif isinstance(event, ev.WorkerExited | ev.WorkerFailed):
            known = processes.get((event.host, event.worker_pid))
            if known is not None and isinstance(event, ev.WorkerExited):
                known.exited.append(event)
            elif known is not None and isinstance(event, ev.WorkerFailed):
                known.failed.append(event)
    return {host: [each[number] for number in sorted(each)] for host, each in found.items()}


def _course_of_rounds(rounds: dict[str, list[_Round]], stopped: bool) -> Course:
    """The failures of the last round are none if the job was stopped."""
    ended: list[Ended] = []
    for each in rounds.values():
        for number, (one, following) in enumerate(zip(each, [*each[1:], None], strict=True)):
            if one.failed and (following is not None or not stopped):
                ended.append(Ended(restart=_restart(number, one, following), place=number))
    number = max(map(len, rounds.values()))
    return Course(
        source="launcher",
        world_size=sum(max(len(one.started) for one in each) for each in rounds.values()),
        ended=sorted(ended, key=lambda each: each.restart.at),
        completed=sum(e.exit_code == 0 for each in rounds.values() for e in each[-1].exited),
        segments=[
            {host: each[n].started[0].time for host, each in rounds.items() if n < len(each)}
            for n in range(number)
        ],
        stretches={
            host: [Stretch(start=one.start, end=one.end, iteration=n) for n, one in enumerate(each)]
            for host, each in rounds.items()
        },
        walls={
            host: [(each[0].start, max((e.time for e in each[-1].exited), default=each[0].last))]
            for host, each in rounds.items()
        },
    )


def _restart(number: int, one: _Round, following: _Round | None) -> Restart:
    total = None if following is None else max(0.0, following.start - one.end)
    # Those that the launcher did not cause itself.
    first, *others = [
        record(
            Cause,
            event,
            interruption="WORKER_FAILED",
            exit=exit_summary(event.exit_code),
            pid=event.worker_pid,
            launcher_rank=event.rank,
        )
        for event in sorted(one.failed, key=lambda event: event.failed_time)
    ]
    return Restart(
        call=0,
        iteration=number,
        at=one.end,
        cause=first,
        others=tuple(others),
        phases=Phases(total=total),
        world_size_before=len(one.started),
        world_size_after=0 if following is None else len(following.started),
        resumed=following is not None,
    )


_SILENT = re.compile(r"no heartbeat for (?P<seconds>[0-9.]+) s")
_DEATHS = (Interruption.TERMINATED, Interruption.UNRESPONSIVE)


class SeenLoss(Record):
    """The loss of a host, as all launchers have recorded it."""

    loss: HostLoss
    times: Mapping[str, float]  # when each host learned of it, by its own clock
    silent: float  # how long the lost host had been silent by then, in seconds


def find_losses(run: Run) -> list[SeenLoss]:
    """Each lost host once.

    The peers of a lost host notice closed connections, often before any launcher has missed its
    heartbeats. Those faults look like first causes; the loss of the host comes later in the log.
    """
    records: dict[str, list[ev.HostLost]] = {}
    for event in run.all(ev.HostLost):
        records.setdefault(event.host_id, []).append(event)
    found = []
    for seen in records.values():
        # A fresh host with the name of the lost one learns of the loss when it joins.
        others = [event for event in seen if event.host != event.name] or seen
        times: dict[str, float] = {}
        for event in others:
            times.setdefault(event.host, event.time)
        silent = _SILENT.search(others[0].reason)
        loss = SeenLoss(
            loss=record(HostLoss, others[0], seen_by=others[0].host),
            times=times,
            silent=float(silent["seconds"]) if silent else 0.0,
        )
        found.append(loss)
    return sorted(found, key=lambda each: each.loss.at)


def name_lost_hosts(course: Course, losses: Sequence[SeenLoss]) -> list[SeenLoss | None]:
    """The lost host that caused each restart."""
    named: list[SeenLoss | None] = [None] * len(course.ended)
    for each in losses:
        if each.loss.left:
            continue
        # The last one that had begun by then on any host that saw the loss, by its own clock.
        begun = [
            i
            for i, ended in enumerate(course.ended)
            if each.loss.name in ended.gone
            and any(
                course.segments[ended.place].get(h, FOREVER) <= t for h, t in each.times.items()
            )
        ]
        # The logs of a lost host may be missing: its members are then in no log.
        found = begun[-1:] or [
            i for i, ended in enumerate(course.ended) if _ended_then(course, ended, each)
        ]
        for i in found:
            if named[i] is None and _may_be_cause(each.loss, course.ended[i]):
                named[i] = each
    return named


def waits_for_lost_hosts(
    course: Course, named: Sequence[SeenLoss | None]
) -> dict[str, list[Stretch]]:
    """The stretches, with the waits for hosts that were lost: no progress, as with a hang."""
    causes = {
        (ended.restart.call, ended.restart.iteration): loss
        for ended, loss in zip(course.ended, named, strict=True)
        if loss is not None and loss.silent > 0
    }

    def corrected(host: str, stretch: Stretch) -> Stretch:
        loss = causes.get((stretch.call, stretch.iteration))
        if loss is None or host not in loss.times:
            return stretch
        since = max(stretch.start, loss.times[host] - loss.silent)
        return dataclasses.replace(stretch, hung_from=min(stretch.hung_from, since))

    return {host: [corrected(host, s) for s in found] for host, found in course.stretches.items()}


def _ended_then(course: Course, ended: Ended, each: SeenLoss) -> bool:
    """Whether the host fell silent in this segment, by the clock of the host of the fault."""
    cause, place = ended.restart.cause, ended.place
    segment = course.segments[place]
    following = course.segments[place + 1] if place + 1 < len(course.segments) else {}
    return any(
        segment[host] <= each.times[host] - each.silent < following.get(host, FOREVER)
        for host in ([cause.host] if cause is not None else each.times)
        if host in each.times and host in segment
    )


def _may_be_cause(loss: HostLoss, ended: Ended) -> bool:
    """Whether no rank of another host failed by itself."""
    return all(
        cause.may_be_harmless
        or cause.interruption == "WORKER_FAILED"
        or (cause.host == loss.name and cause.interruption in _DEATHS and not cause.exit)
        for cause in (ended.restart.cause, *ended.restart.others)
        if cause is not None
    )
