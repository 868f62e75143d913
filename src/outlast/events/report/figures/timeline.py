"""The timeline of a run, by host: a lane for each rank, for the host and for checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import (
    CheckpointPassedOver,
    Event,
    HostJoined,
    HostLost,
    MonitorRestarted,
    ReplicaMismatch,
    StopRequested,
    StragglerFound,
)
from outlast.events.report.figures.causes import what_failed
from outlast.events.report.history.lanes import LaneKey, Track, mark_hang
from outlast.events.report.model import (
    Cause,
    HostLoss,
    HostTimeline,
    InjectedFault,
    Lane,
    Mark,
    Restart,
    Saves,
    Span,
)
from outlast.events.report.words import one_line
from outlast.system.units import duration_text

SAVING = "saving"


def timeline_of(
    tracks: Mapping[LaneKey, Track],
    events: Sequence[Event],
    origins: Mapping[str, float],
    segments: Sequence[Mapping[str, float]],
    reference: str,
    restarts: Iterable[Restart],
    saves: Saves | None,
    injected: Iterable[InjectedFault],
    losses: Iterable[HostLoss],
) -> tuple[HostTimeline, ...]:
    """The timeline of each host; `reference` is the host whose times are not shifted."""
    _mark_faults(tracks, restarts, origins)
    for fault in injected:
        track = tracks.get((fault.host, fault.rank))
        if fault.fired and track is not None:
            text = f"planned fault: {fault.kind}"
            at = fault.at + origins[fault.host]
            track.marks.append(Mark(kind="injected", at=at, text=text))
    others = _other_lanes(events, origins, saves, losses)
    ends: dict[str, float] = {}
    for event in events:
        ends[event.host] = max(event.time - origins[event.host], ends.get(event.host, 0.0))
    found = []
    for host in sorted({host for host, _ in tracks} | set(others)):
        lanes = [
            Lane(
                name=f"rank {rank}",
                rank=rank,
                spans=tuple(_shifted(span, origins[host]) for span in track.spans),
                marks=_in_order(
                    Mark(kind=mark.kind, at=mark.at - origins[host], text=mark.text)
                    for mark in track.marks
                ),
            )
            for (own, rank), track in sorted(tracks.items())
            if own == host
        ]
        found.append(
            HostTimeline(
                host=host,
                end=ends.get(host, 0.0),
                shift=_shift(host, reference, segments, origins),
                lanes=(*lanes, *others.get(host, ())),
            )
        )
    return tuple(found)


def _mark_faults(
    tracks: Mapping[LaneKey, Track], restarts: Iterable[Restart], origins: Mapping[str, float]
) -> None:
    """Marks each fault on the lane of its process."""
    for restart in restarts:
        for cause in (restart.cause, *restart.others):
            if cause is None or cause.host not in origins:
                continue
            track = tracks.get((cause.host, _lane_rank(cause)))
            if track is None:
                continue
            if cause.idle and not cause.consequence:
                mark_hang(track, cause, origins[cause.host])
            first = cause is restart.cause and restart.host_loss is None
            text = f"{what_failed(cause)}: {one_line(cause.message)}"
            kind = "fault" if first or not cause.may_be_harmless else "consequence"
            track.marks.append(Mark(kind=kind, at=cause.at + origins[cause.host], text=text))


def _lane_rank(cause: Cause) -> int:
    return cause.launcher_rank if cause.launcher_rank >= 0 else cause.rank


def _other_lanes(
    events: Iterable[Event],
    origins: Mapping[str, float],
    saves: Saves | None,
    losses: Iterable[HostLoss],
) -> dict[str, list[Lane]]:
    hosts: dict[str, list[Mark]] = defaultdict(list)
    checkpoints: dict[str, list[Mark]] = defaultdict(list)
    spans: dict[str, list[Span]] = defaultdict(list)
    stopped: set[str] = set()
    for event in events:
        at = event.time - origins[event.host]
        if isinstance(event, HostLost):
            continue  # every launcher has recorded it
        if isinstance(event, HostJoined) and event.name == event.host:
            text = f"host {event.name} joined"
            hosts[event.host].append(Mark(kind="host_joined", at=at, text=one_line(text)))
        elif isinstance(event, StopRequested) and event.host not in stopped:
            stopped.add(event.host)
            text = f"told to stop: {event.reason}"
            hosts[event.host].append(Mark(kind="stop", at=at, text=one_line(text)))
        elif isinstance(event, MonitorRestarted):
            text = f"monitor process of rank {event.rank} restarted"
            hosts[event.host].append(Mark(kind="monitor_restarted", at=at, text=text))
        elif isinstance(event, ReplicaMismatch):
            ranks = ", ".join(str(rank) for rank in event.ranks)
            text = f"replicas differ after step {event.step}: ranks {ranks}"
            hosts[event.host].append(Mark(kind="mismatch", at=at, text=text))
        elif isinstance(event, StragglerFound):
            slow = f"rank {event.straggler} on {event.straggler_host} is slow"
            slow_s, typical_s = duration_text(event.seconds), duration_text(event.typical_seconds)
            text = f"{slow}: {slow_s} a step, others {typical_s}"
            hosts[event.host].append(Mark(kind="straggler", at=at, text=one_line(text)))
        elif isinstance(event, CheckpointPassedOver) and event.rank == 0:
            text = f"step {event.step} passed over: {event.cause}"
            mark = Mark(kind="passed_over", at=at, text=one_line(text))
            checkpoints[event.host].append(mark)
    for loss in losses:
        how = "left" if loss.left else "lost"
        mark = Mark(
            kind="host_lost",
            at=loss.at,
            text=one_line(f"host {loss.name} {how}: {loss.reason}"),
        )
        hosts[loss.seen_by].append(mark)
    for save in () if saves is None else saves.each:
        end = save.at + save.seconds
        spans[save.host].append(Span(state=SAVING, start=save.at, end=end))
        if save.cause:
            text = f"step {save.step} not saved: {save.cause}"
            checkpoints[save.host].append(Mark(kind="not_saved", at=end, text=one_line(text)))
    for restore in () if saves is None else saves.restores:
        text = f"step {restore.step} restored from {restore.source}"
        mark = Mark(kind="restored", at=restore.at, text=one_line(text))
        checkpoints[restore.host].append(mark)
    lanes: dict[str, list[Lane]] = defaultdict(list)
    for host in hosts:
        lanes[host].append(Lane(name="host", rank=-1, spans=(), marks=_in_order(hosts[host])))
    for host in {**checkpoints, **spans}:
        own = tuple(sorted(spans[host], key=lambda span: span.start))
        marks = _in_order(checkpoints[host])
        lanes[host].append(Lane(name="checkpoints", rank=-1, spans=own, marks=marks))
    return lanes


def _in_order(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    return tuple(sorted(marks, key=lambda mark: mark.at))


def _shifted(span: Span, origin: float) -> Span:
    return Span(state=span.state, start=span.start - origin, end=span.end - origin)


def _shift(
    host: str,
    reference: str,
    segments: Sequence[Mapping[str, float]],
    origins: Mapping[str, float],
) -> float | None:
    """Hosts enter an iteration after a barrier, so at nearly the same moment."""
    if host == reference:
        return 0.0
    for segment in segments:
        if host in segment and reference in segment:
            theirs = segment[reference] - origins[reference]
            return theirs - (segment[host] - origins[host])
    return None
