"""The present state of a run, from its events: its processes, its checkpoints, how it ended.

Events are applied in the order in which a follower finds them. The events of one process are in
order. Those of two processes may arrive late by one poll, so a state is never replaced by an older
one of the same process.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

import outlast.events.types as ev
from outlast.events.event import Event


class State(enum.Enum):
    """What a process of the job does."""

    STARTING = "starting"
    WAITING = "waiting"  # has asked to join
    RUNNING = "running"
    RESERVE = "reserve"
    RESTARTING = "restarting"
    RETURNED = "returned"
    COMPLETED = "completed"
    LOST = "lost"
    ENDED = "ended"


_OVER = (State.COMPLETED, State.LOST, State.ENDED)
_STATES: dict[type[Event], State] = {
    ev.Joined: State.WAITING,
    ev.Seen: State.RESTARTING,
    ev.Fault: State.RESTARTING,
    ev.Completed: State.COMPLETED,
}
"""The state that an event begins, whatever is in it."""


@dataclasses.dataclass
class Process:
    """A process of the job: a rank, or one that is about to be one."""

    host: str
    pid: int
    rank: int = -1  # -1 before it has one
    member: int = -1
    iteration: int = -1
    state: State = State.STARTING
    since: float = 0.0  # when `state` began
    seen: float = 0.0  # the time of its last event
    # the last step that it has recorded, and when; `None` if it has not
    step: int | None = None
    step_time: float = 0.0
    rate: float | None = None  # steps per second between its last two records
    # the CPU time of its training thread for each step since the last restore
    cpu_a_step: float | None = None

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def apply_step(self, event: Event) -> None:
        if isinstance(event, ev.StepsDone):
            self._record_step(event.first, event.last, event.time)
            if event.cpu_seconds and event.last > event.first:
                self.cpu_a_step = event.cpu_seconds / (event.last - event.first)
        elif isinstance(event, ev.CheckpointRestored | ev.NothingToRestore):
            self.step = event.step if isinstance(event, ev.CheckpointRestored) else 0
            self.step_time, self.rate = event.time, None
        elif isinstance(event, ev.CheckpointCommitted) and (self.step or 0) < event.step:
            # Without `Job`, which records steps, a save shows how far training has come.
            rate = self.rate
            self._record_step(self.step or 0, event.step, event.time - event.seconds)
            self.rate = self.rate or rate

    def _record_step(self, first: int, last: int, time: float) -> None:
        """Notes that the steps after `first` up to `last` are done."""
        before, elapsed = self.step, time - self.step_time
        going_on = before is not None and first <= before < last and elapsed > 0
        self.rate = (last - (before or 0)) / elapsed if going_on else None
        self.step, self.step_time = last, time


class RunState:
    """The present state of a run."""

    def __init__(self) -> None:
        # by host and process ID, in the order in which they were first seen
        self.processes: dict[tuple[str, int], Process] = {}
        # the newest iteration that a process was assigned to; -1 if there is none
        self.iteration = -1
        self.now: dict[str, float] = {}  # the time of the last event of each host
        # the last committed save, as each host recorded it: their clocks are not compared
        self.newest_saves: dict[str, ev.CheckpointCommitted] = {}
        self.hosts_lost: dict[str, str] = {}  # the names of lost hosts
        self.leaving: dict[str, str] = {}  # by the ID of each host that is to leave: how, in words
        self.stop = ""  # why the job was told to stop; empty if it was not
        self.launchers: set[str] = set()  # the hosts whose launchers have recorded workers
        self.exit_codes: dict[str, int] = {}  # how the launcher of each host ended
        self._saves: Counter[tuple[type[Event], str, int]] = Counter()
        self._of_member: dict[int, Process] = {}

    @property
    def current(self) -> list[Process]:
        """The processes that take part or are about to, by rank; those of the last iteration if
        all have ended.
        """
        processes = list(self.processes.values())
        found = [each for each in processes if not each.over]
        if not found:
            found = [each for each in processes if each.iteration == self.iteration]
            found = [each for each in found if each.state is not State.LOST] or found
        return sorted(found, key=lambda p: (p.rank < 0, p.rank, p.host, p.pid))

    def saves(self, kind: type[ev.CheckpointCommitted] | type[ev.CheckpointFailed]) -> int:
        """The number of committed or failed saves. Every rank records each of them, so that the
        rank with the most records has seen all that its host took part in.
        """
        return max((n for (own, *_), n in self._saves.items() if own is kind), default=0)

    def apply(self, event: Event) -> None:
        self.now[event.host] = max(event.time, self.now.get(event.host, event.time))
        if isinstance(event, ev.CheckpointCommitted | ev.CheckpointFailed):
            self._saves[type(event), event.host, event.rank] += 1
            newest = self.newest_saves.get(event.host)
            if isinstance(event, ev.CheckpointCommitted) and (
                newest is None or newest.time <= event.time
            ):
                self.newest_saves[event.host] = event
        if isinstance(event, ev.WorkerStarted | ev.WorkerExited):
            self._apply_worker(event)
        elif isinstance(event, ev.LauncherEnded):
            self.exit_codes[event.host] = event.exit_code
        elif isinstance(event, ev.HostLost):
            self.leaving.pop(event.host_id, None)
            if not event.left:
                self.hosts_lost.setdefault(event.host_id, event.name)
        elif isinstance(event, ev.HostLeaving):
            how = f"{event.name} to {event.to}" if event.to else f"{event.name}, waits for a host"
            self.leaving[event.host_id] = how
            if event.stays:
                del self.leaving[event.host_id]
        elif isinstance(event, ev.StopRequested):
            self.stop = self.stop or event.reason
        else:
            self._apply_rank(event)

    def _apply_worker(self, event: ev.WorkerStarted | ev.WorkerExited) -> None:
        self.launchers.add(event.host)
        self.exit_codes.pop(event.host, None)  # a host that joined again
        process = self._process(event.host, event.worker_pid)
        process.seen = max(process.seen, event.time)
        if process.rank < 0:
            process.rank = event.rank
        if isinstance(event, ev.WorkerStarted):
            process.since = process.since or event.time
        elif not process.over:
            # With `Wrapper`, a loss is an event of its own. Without it, this is all that is known.
            lost = event.exit_code != 0 and not self.stop
            process.state = State.LOST if lost else State.ENDED
            process.since = event.time

    def _apply_rank(self, event: Event) -> None:
        process = self.processes.get((event.host, event.pid))
        if isinstance(event, ev.Assigned | ev.Entered | ev.Joined):
            process = self._process(event.host, event.pid)
            process.iteration = event.iteration if event.iteration >= 0 else process.iteration
        if process is None:
            # From the monitor process of another rank, perhaps on another host.
            process = self._of_member.get(event.member)
            if process is not None and isinstance(event, ev.Lost) and not process.over:
                # A rank that leaves because the job was told to stop is not lost.
                process.state = State.ENDED if self.stop else State.LOST
                process.since = process.seen
            return
        process.seen = max(process.seen, event.time)
        if event.member >= 0:
            process.member = event.member
            self._of_member[event.member] = process
        process.apply_step(event)
        if isinstance(event, ev.Assigned | ev.Entered):
            process.rank = event.rank
            if event.iteration >= self.iteration or event.iteration == 0:
                self.iteration = event.iteration
        state = self._state_after(event)
        if state is not None and (event.time >= process.since or state in _OVER):
            process.state, process.since = state, event.time

    def _state_after(self, event: Event) -> State | None:
        if isinstance(event, ev.Entered):
            return State.RUNNING if event.active else State.RESERVE
        if isinstance(event, ev.LeftFunction):
            return State.RETURNED if event.outcome == "returned" else State.RESTARTING
        if isinstance(event, ev.Lost):
            return State.ENDED if self.stop or event.moved else State.LOST
        return _STATES.get(type(event))

    def _process(self, host: str, pid: int) -> Process:
        return self.processes.setdefault((host, pid), Process(host, pid))
