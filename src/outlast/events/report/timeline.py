"""The timeline of a run, by host: a lane for each rank, for the host and for checkpoints.

The lane of a rank is a place in the job: a replacement continues the lane of the process that it
replaces. Each process goes through states; an event ends one and begins the next.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import outlast.events.types as ev
from outlast.events.event import Event
from outlast.events.report.course import Course
from outlast.events.report.model import Cause, HostLoss, Restart, Span
from outlast.events.report.report import HostTimeline, InjectedFault, Lane, Mark, Saves
from outlast.events.report.run import Process, Run
from outlast.events.report.sentences import one_line, what_failed
from outlast.events.restart_causes import Interruption
from outlast.system.units import duration_text

STARTING, RESTORING, TRAINING, HUNG = "starting", "restoring", "training", "hung"
RESERVE, RESTARTING, LOST, ENDED = "reserve", "restarting", "lost", "ended"
_DEATHS = (Interruption.TERMINATED, Interruption.HARD_TIMEOUT, Interruption.UNRESPONSIVE)


@dataclasses.dataclass
class Track:
    """The lane of one rank while it is made."""

    spans: list[Span] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    state: str = ""
    since: float = 0.0
    process: Process | None = None
    last: float = 0.0  # the last event of the process

    def change(self, state: str, time: float) -> None:
        """Ends the current state; `ENDED` and an empty state leave no span."""
        if state != self.state:
            if self.state not in ("", ENDED) and time > self.since:
                self.spans.append(Span(state=self.state, start=self.since, end=time))
            self.state, self.since = state, time

    def mark(self, kind: str, at: float, text: str) -> None:
        self.marks.append(Mark(kind=kind, at=at, text=one_line(text)))

    def lane(self, name: str, rank: int = -1) -> Lane:
        marks = sorted(self.marks, key=lambda mark: mark.at)
        spans = sorted(self.spans, key=lambda span: span.start)
        return Lane(name=name, rank=rank, spans=tuple(spans), marks=tuple(marks))


def timeline_of(
    run: Run,
    course: Course,
    reference: str,
    restarts: Iterable[Restart],
    saves: Saves | None,
    injected: Iterable[InjectedFault],
    losses: Iterable[HostLoss],
) -> tuple[HostTimeline, ...]:
    """The timeline of each host; `reference` is the host whose times are not shifted."""
    tracks = _tracks(run, course.source != "launcher", restarts)
    _mark_faults(tracks, restarts)
    for fault in injected:
        if fault.fired and (fault.host, fault.rank) in tracks:
            tracks[fault.host, fault.rank].mark("injected", fault.at, f"planned: {fault.kind}")
    lanes: dict[str, list[Lane]] = defaultdict(list)
    for (host, rank), track in sorted(tracks.items()):
        lanes[host].append(track.lane(f"rank {rank}", rank))
    for (host, name), track in _other_tracks(run, saves, losses).items():
        lanes[host].append(track.lane(name))
    return tuple(
        HostTimeline(
            host=host,
            end=run.ends[host],
            shift=_shift(host, reference, course.segments),
            lanes=tuple(lanes[host]),
        )
        for host in sorted(lanes)
    )


def _tracks(run: Run, wrapped: bool, restarts: Iterable[Restart]) -> dict[tuple[str, int], Track]:
    """The lanes of all ranks, by host and rank; without `Wrapper`, a process trains throughout."""
    members = {e.member: (e.host, e.pid) for e in run.all(ev.Assigned, ev.Entered)}
    tracks: dict[tuple[str, int], Track] = {}
    for event in run.events:
        process = (event.host, getattr(event, "worker_pid", event.pid))
        if isinstance(event, ev.Lost | ev.Fault) and event.member in members:
            process = members[event.member]  # a monitor process reports on its rank
        if process not in run.lanes:
            continue
        track = tracks.setdefault((process[0], run.lanes[process]), Track())
        begun = isinstance(event, ev.WorkerStarted | ev.Joined)
        if begun and track.state not in ("", LOST, STARTING):
            track.change(LOST, track.last)  # its host was lost: nothing recorded its end
        if isinstance(event, ev.WorkerStarted | ev.Assigned | ev.Entered | ev.Joined):
            track.process = process
        if process == track.process:  # a late report on a process that was replaced changes nothing
            track.last = event.time
            _advance(track, event, wrapped, ENDED if run.stops else LOST)
    lost = {members.get(party.member) for restart in restarts for party in restart.lost}
    for (host, _), track in tracks.items():
        if track.process in lost and track.state not in ("", ENDED):
            track.change(LOST, track.last)  # with its host, for which no other came
        track.change("", run.ends[host])
    return tracks


def _advance(track: Track, event: Event, wrapped: bool, gone: str) -> None:
    time = event.time
    if isinstance(event, ev.WorkerStarted):
        track.change(STARTING if wrapped else TRAINING, time)
        if event.attempt > 0:
            how = "a standby process took the rank over" if event.standby else "a new process"
            track.mark("takeover", time, f"{how} (pid {event.worker_pid})")
    elif isinstance(event, ev.Joined) or (
        isinstance(event, ev.Assigned) and track.state in ("", LOST)
    ):
        track.change(STARTING, time)
    elif isinstance(event, ev.Entered):
        track.change(TRAINING if event.active else RESERVE, time)
    elif isinstance(event, ev.CheckpointRestored | ev.NothingToRestore):
        before = track.spans[-1] if track.spans else None
        again = before and before.state == RESTORING and before.end == track.since
        if track.state == TRAINING and not again:  # from the entry on, it has restored
            track.state = RESTORING if wrapped else STARTING
            track.change(TRAINING, time)
    elif isinstance(event, ev.Completed) or (
        isinstance(event, ev.LeftFunction) and event.outcome == "returned"
    ):
        track.change(ENDED, time)
    elif isinstance(event, ev.WorkerExited):
        track.change(ENDED if event.exit_code == 0 or track.state == ENDED else gone, time)
    elif isinstance(event, ev.Lost) or (
        isinstance(event, ev.Fault) and event.interruption in _DEATHS
    ):
        track.change(gone, time)
    elif isinstance(event, ev.Fault | ev.Seen | ev.LeftFunction) and track.state in (
        TRAINING,
        RESERVE,
    ):
        track.change(RESTARTING, time)


def _mark_faults(tracks: dict[tuple[str, int], Track], restarts: Iterable[Restart]) -> None:
    for restart in restarts:
        for cause in (restart.cause, *restart.others):
            if cause is None:
                continue
            rank = cause.launcher_rank if cause.launcher_rank >= 0 else cause.rank
            track = tracks.get((cause.host, rank))
            if track is None:
                continue
            if cause.idle and not cause.consequence:
                track.spans[:] = [part for span in track.spans for part in _hung(span, cause)]
            first = cause is restart.cause and restart.host_loss is None
            kind = "fault" if first or not cause.may_be_harmless else "consequence"
            track.mark(kind, cause.at, f"{what_failed(cause)}: {one_line(cause.message)}")


def _hung(span: Span, cause: Cause) -> list[Span]:
    """The span, with the time without progress before the fault of a hung rank."""
    end, begin = cause.at, cause.at - cause.idle
    if span.state != TRAINING or span.start >= end or not begin < span.end <= end + cause.idle:
        return [span]
    cut = max(span.start, begin)
    before = [dataclasses.replace(span, end=cut)] if cut > span.start else []
    return [*before, Span(state=HUNG, start=cut, end=span.end)]


def _other_tracks(
    run: Run, saves: Saves | None, losses: Iterable[HostLoss]
) -> dict[tuple[str, str], Track]:
    """The lanes "host" and "checkpoints", by host and name."""
    hosts: dict[tuple[str, str], Track] = defaultdict(Track)
    checkpoints: dict[tuple[str, str], Track] = defaultdict(Track)

    def mark(event: Event, kind: str, text: str) -> None:
        hosts[event.host, "host"].mark(kind, event.time, text)

    for joined in run.all(ev.HostJoined):
        if joined.name == joined.host:  # each launcher records all of them
            mark(joined, "host_joined", f"host {joined.name} joined")
    for stop in run.all(ev.StopRequested):
        if stop.time == run.stops[stop.host]:
            mark(stop, "stop", f"told to stop: {stop.reason}")
    for monitor in run.all(ev.MonitorRestarted):
        mark(monitor, "monitor_restarted", f"monitor process of rank {monitor.rank} restarted")
    for mismatch in run.all(ev.ReplicaMismatch):
        ranks = ", ".join(str(rank) for rank in mismatch.ranks)
        mark(mismatch, "mismatch", f"replicas differ after step {mismatch.step}: ranks {ranks}")
    for slow in run.all(ev.StragglerFound):
        own, others = duration_text(slow.seconds), duration_text(slow.typical_seconds)
        where = f"rank {slow.straggler} on {slow.straggler_host}"
        mark(slow, "straggler", f"{where} is slow: {own} a step, others {others}")
    for loss in losses:
        text = f"host {loss.name} {'left' if loss.left else 'lost'}: {loss.reason}"
        hosts[loss.seen_by, "host"].mark("host_lost", loss.at, text)
    for passed in run.all(ev.CheckpointPassedOver):
        if passed.rank == 0:
            text = f"step {passed.step} passed over: {passed.cause}"
            checkpoints[passed.host, "checkpoints"].mark("passed_over", passed.time, text)
    for save in saves.each if saves else ():
        track, end = checkpoints[save.host, "checkpoints"], save.at + save.seconds
        track.spans.append(Span(state="saving", start=save.at, end=end))
        if save.cause:
            track.mark("not_saved", end, f"step {save.step} not saved: {save.cause}")
    for restore in saves.restores if saves else ():
        text = f"step {restore.step} restored from {restore.source}"
        checkpoints[restore.host, "checkpoints"].mark("restored", restore.at, text)
    return {**hosts, **checkpoints}


def _shift(host: str, reference: str, segments: Sequence[dict[str, float]]) -> float | None:
    """Hosts enter an iteration after a barrier, so at nearly the same moment."""
    if host == reference:
        return 0.0
    both = (each for each in segments if host in each and reference in each)
    return next((each[reference] - each[host] for each in both), None)
