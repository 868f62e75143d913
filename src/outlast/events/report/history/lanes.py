"""The timeline of each rank, from the events of its processes.

A lane is a place in the job: a replacement continues the lane of the process that it replaces. Each
process goes through states; an event ends one and begins the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import (
    Assigned,
    CheckpointRestored,
    Completed,
    Entered,
    Event,
    Fault,
    Joined,
    LeftFunction,
    Lost,
    NothingToRestore,
    Seen,
    WorkerExited,
    WorkerStarted,
)
from outlast.events.report.history.split_calls import Process
from outlast.events.report.model import Cause, Mark, Span

STARTING, RESTORING, TRAINING, HUNG = "starting", "restoring", "training", "hung"
RESERVE, RESTARTING, LOST, ENDED = "reserve", "restarting", "lost", "ended"

LaneKey = tuple[str, int]
"""Host and rank."""


@dataclasses.dataclass
class Track:
    """The lane of one rank while it is made; times are those of the clock of its host."""

    spans: list[Span] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    state: str = ""
    since: float = 0.0
    process: Process | None = None
    last: float = 0.0  # the last event of the process

    def change(self, state: str, time: float) -> None:
        """Ends the current state. Of two equal states in a row, one span is made."""
        if state == self.state:
            return
        self.close(time)
        self.state, self.since = state, time

    def close(self, time: float) -> None:
        """Ends the current state; `ENDED` and an empty state leave no span."""
        if self.state not in ("", ENDED) and time > self.since:
            self.spans.append(Span(state=self.state, start=self.since, end=time))
        self.state = ""


def lanes_of(
    events: Sequence[Event], launcher_ranks: Mapping[Process, int], wrapped: bool, stopped: bool
) -> dict[LaneKey, Track]:
    """The lanes of all ranks.

    Args:
        events: those of the whole run.
        launcher_ranks: the rank of each process in the launcher's messages.
        wrapped: whether the script uses `Wrapper`; else a process trains from its start to its end.
        stopped: whether the job was told to stop: ranks that leave are not lost.
    """
    keys, members = _places(events, launcher_ranks)
    tracks: dict[LaneKey, Track] = {}
    ends: dict[str, float] = {}
    for event in sorted(events, key=lambda event: event.time):
        ends[event.host] = event.time
        process = (event.host, getattr(event, "worker_pid", event.pid))
        if isinstance(event, Lost | Fault) and event.member in members:
            process = members[event.member]  # a monitor process reports on its rank
        if process not in keys:
            continue
        track = tracks.setdefault(keys[process], Track())
        if isinstance(event, WorkerStarted | Joined) and track.state not in ("", LOST, STARTING):
            track.change(LOST, track.last)  # its host was lost: nothing recorded its end
        if isinstance(event, WorkerStarted | Assigned | Entered | Joined):
            track.process = process
        if process == track.process:  # a late report on a process that was replaced changes nothing
            track.last = event.time
            _advance(track, event, wrapped, stopped)
    for (host, _), track in tracks.items():
        track.close(ends[host])
    return tracks


def mark_hang(track: Track, cause: Cause, origin: float) -> None:
    """Shows the time without progress before the fault of a hung rank."""
    end = cause.at + origin
    begin = end - cause.idle
    spans: list[Span] = []
    for span in track.spans:
        if span.state == TRAINING and span.start < end and begin < span.end <= end + cause.idle:
            cut = max(span.start, begin)
            if cut > span.start:
                spans.append(dataclasses.replace(span, end=cut))
            spans.append(Span(state=HUNG, start=cut, end=span.end))
        else:
            spans.append(span)
    track.spans[:] = spans


def _places(
    events: Iterable[Event], launcher_ranks: Mapping[Process, int]
) -> tuple[dict[Process, LaneKey], dict[int, Process]]:
    """The lane of each process of a rank, and the process of each member."""
    keys: dict[Process, LaneKey] = {
        process: (process[0], rank) for process, rank in launcher_ranks.items()
    }
    members: dict[int, Process] = {}
    firsts: dict[Process, Event] = {}
    for event in events:
        if isinstance(event, Assigned | Entered):
            process = (event.host, event.pid)
            members[event.member] = process
            first = firsts.get(process)
            if first is None or event.time < first.time:
                firsts[process] = event
    for process, event in firsts.items():
        keys.setdefault(process, (event.host, event.rank))
    return keys, members


def _advance(track: Track, event: Event, wrapped: bool, stopped: bool) -> None:
    time, gone = event.time, ENDED if stopped else LOST
    if isinstance(event, WorkerStarted):
        track.change(STARTING if wrapped else TRAINING, time)
        if event.attempt > 0:
            how = "a standby process took the rank over" if event.standby else "a new process"
            text = f"{how} (pid {event.worker_pid})"
            track.marks.append(Mark(kind="takeover", at=time, text=text))
    elif isinstance(event, Joined) or (isinstance(event, Assigned) and track.state in ("", LOST)):
        track.change(STARTING, time)
    elif isinstance(event, Entered):
        track.change(TRAINING if event.active else RESERVE, time)
    elif isinstance(event, CheckpointRestored | NothingToRestore):
        _restored(track, time, wrapped)
    elif isinstance(event, Completed) or (
        isinstance(event, LeftFunction) and event.outcome == "returned"
    ):
        track.change(ENDED, time)
    elif isinstance(event, WorkerExited):
        track.change(ENDED if event.exit_code == 0 or track.state == ENDED else gone, time)
    elif isinstance(event, Lost) or (isinstance(event, Fault) and event.interruption in _DEATHS):
        track.change(gone, time)
    elif isinstance(event, Fault | Seen | LeftFunction) and track.state in (TRAINING, RESERVE):
        track.change(RESTARTING, time)


_DEATHS = ("TERMINATED", "HARD_TIMEOUT", "UNRESPONSIVE")


def _restored(track: Track, time: float, wrapped: bool) -> None:
    """The time from the entry to the first restore was that of the restore."""
    if track.state != TRAINING:
        return
    before = track.spans[-1] if track.spans else None
    if before is not None and before.state == RESTORING and before.end == track.since:
        return  # a second restore, such as one of a `Checkpointer` used directly
    track.state = RESTORING if wrapped else STARTING
    track.change(TRAINING, time)
