"""The present state of a run, from its events: its processes, its checkpoints, how it ended.

Events are applied in the order in which a follower finds them. The events of one process are in
order. Those of two processes may arrive late by one poll, so a state is never replaced by an older
one of the same process.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from outlast.events import (
    Assigned,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRestored,
    Completed,
    Entered,
    Event,
    Fault,
    HostLost,
    Joined,
    LauncherEnded,
    LeftFunction,
    Lost,
    NothingToRestore,
    Seen,
    StepsDone,
    StopRequested,
    WorkerExited,
    WorkerStarted,
)


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


@dataclasses.dataclass
class Process:
    """A process of the job: a rank, or one that is about to be one.

    Attributes:
        rank: -1 before it has one.
        launcher_rank: the rank in the launcher's messages; -1 without a launcher.
        since: when `state` began.
        seen: the time of its last event.
        step: the last step that it has recorded; `None` if it has recorded none.
        step_time: when it recorded that step.
        rate: steps per second between its last two records.
        exit_code: `None` until the launcher has recorded it.
    """

    host: str
    pid: int
    rank: int = -1
    launcher_rank: int = -1
    member: int = -1
    iteration: int = -1
    state: State = State.STARTING
    since: float = 0.0
    seen: float = 0.0
    step: int | None = None
    step_time: float = 0.0
    rate: float | None = None
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        """Whether it takes no part any more."""
        return self.state in _OVER


@dataclasses.dataclass
class Checkpoints:
    """The saves of a run.

    Attributes:
        newest: the last committed save, as each host recorded it: their clocks are not compared.
        restored: the same for the last restore.
    """

    newest: dict[str, CheckpointCommitted] = dataclasses.field(default_factory=dict)
    restored: dict[str, CheckpointRestored] = dataclasses.field(default_factory=dict)
    _committed: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    _failed: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)

    @property
    def committed(self) -> int:
        """The number of committed saves. Every rank records each save, so the rank with the most
        records has seen all that its host took part in.
        """
        return max(self._committed.values(), default=0)

    @property
    def failed(self) -> int:
        """The number of failed saves, counted in the same way."""
        return max(self._failed.values(), default=0)

    def apply(self, event: CheckpointCommitted | CheckpointFailed | CheckpointRestored) -> None:
        """Notes a save or a restore."""
        if isinstance(event, CheckpointRestored):
            self.restored[event.host] = event
        elif isinstance(event, CheckpointFailed):
            self._failed[event.host, event.rank] += 1
        else:
            self._committed[event.host, event.rank] += 1
            newest = self.newest.get(event.host)
            if newest is None or newest.time <= event.time:
                self.newest[event.host] = event


class RunState:
    """The present state of a run.

    Attributes:
        processes: by host and process ID, in the order in which they were first seen.
        iteration: the newest iteration that a process was assigned to; -1 if there is none.
        world_size: its number of ranks.
        now: the time of the last event of each host.
        hosts_lost: the names of lost hosts.
        stop: why the job was told to stop; empty if it was not.
        launchers: the process ID of each host's launcher.
        exit_codes: how the launcher of each host ended.
    """

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], Process] = {}
        self.checkpoints = Checkpoints()
        self.iteration = -1
        self.world_size = 0
        self.now: dict[str, float] = {}
        self.hosts_lost: dict[str, str] = {}
        self.stop = ""
        self.launchers: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}
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
            ended = [each for each in found if each.state is not State.LOST]
            found = ended or found
        return sorted(found, key=lambda p: (_order(p), p.host, p.pid))

    @property
    def lost(self) -> int:
        """The number of processes that the job has lost so far."""
        return sum(each.state is State.LOST for each in self.processes.values())

    def apply(self, event: Event) -> None:
        """Takes one event."""
        self.now[event.host] = max(event.time, self.now.get(event.host, event.time))
        if isinstance(event, WorkerStarted | WorkerExited):
            self._apply_worker(event)
        elif isinstance(event, LauncherEnded):
            self.exit_codes[event.host] = event.exit_code
        elif isinstance(event, HostLost):
            if not event.left:
                self.hosts_lost.setdefault(event.host_id, event.name)
        elif isinstance(event, StopRequested):
            self.stop = self.stop or event.reason
        else:
            self._apply_rank(event)

    def _apply_worker(self, event: WorkerStarted | WorkerExited) -> None:
        self.launchers[event.host] = event.pid
        self.exit_codes.pop(event.host, None)  # a host that joined again
        process = self._process(event.host, event.worker_pid)
        process.launcher_rank = event.rank
        process.seen = max(process.seen, event.time)
        if process.rank < 0:
            process.rank = event.rank
        if isinstance(event, WorkerStarted):
            process.since = process.since or event.time
            return
        process.exit_code = event.exit_code
        if not process.over:
            # With `Wrapper`, a loss is an event of its own. Without it, this is all that is known.
            lost = event.exit_code != 0 and not self.stop
            process.state = State.LOST if lost else State.ENDED
            process.since = event.time

    def _apply_rank(self, event: Event) -> None:
        if isinstance(event, Fault | Lost) and (event.host, event.pid) not in self.processes:
            # From the monitor process of another rank, perhaps on another host.
            process = self._of_member.get(event.member)
            if process is not None and isinstance(event, Lost) and not process.over:
                # A rank that leaves because the job was told to stop is not lost.
                process.state = State.ENDED if self.stop else State.LOST
                process.since = process.seen
            return
        if isinstance(event, Assigned | Entered | Joined):
            process = self._process(event.host, event.pid)
        else:
            known = self.processes.get((event.host, event.pid))
            if known is None:
                self._apply_checkpoint(event, None)
                return
            process = known
        process.seen = max(process.seen, event.time)
        if isinstance(event, Assigned | Entered | Joined) and event.iteration >= 0:
            process.iteration = event.iteration
        if event.member >= 0:
            process.member = event.member
            self._of_member[event.member] = process
        self._apply_checkpoint(event, process)
        self._apply_transition(event, process)

    def _apply_transition(self, event: Event, process: Process) -> None:
        state = None
        if isinstance(event, Joined):
            state = State.WAITING
        elif isinstance(event, Assigned):
            process.rank = event.rank
            if event.iteration >= self.iteration or event.iteration == 0:
                self.iteration, self.world_size = event.iteration, event.world_size
        elif isinstance(event, Entered):
            process.rank = event.rank
            state = State.RUNNING if event.active else State.RESERVE
        elif isinstance(event, Seen | Fault):
            state = State.RESTARTING
        elif isinstance(event, LeftFunction):
            returned = event.outcome == "returned"
            state = State.RETURNED if returned else State.RESTARTING
        elif isinstance(event, Completed):
            state = State.COMPLETED
        elif isinstance(event, Lost):
            state = State.ENDED if self.stop else State.LOST
        if state is not None and (event.time >= process.since or state in _OVER):
            process.state, process.since = state, event.time

    def _apply_checkpoint(self, event: Event, process: Process | None) -> None:
        if isinstance(event, CheckpointCommitted | CheckpointFailed | CheckpointRestored):
            self.checkpoints.apply(event)
        if process is None:
            return
        if isinstance(event, StepsDone):
            before, elapsed = process.step, event.time - process.step_time
            going_on = before is not None and event.first <= before < event.last and elapsed > 0
            process.rate = (
                (event.last - before) / elapsed if going_on and before is not None else None
            )
            process.step, process.step_time = event.last, event.time
        elif isinstance(event, CheckpointRestored | NothingToRestore):
            process.step = event.step if isinstance(event, CheckpointRestored) else 0
            process.step_time, process.rate = event.time, None
        elif isinstance(event, CheckpointCommitted) and (process.step or 0) < event.step:
            # Without `Job`, which records steps, a save shows how far training has come.
            before, begun = process.step, event.time - event.seconds
            if before is not None and begun > process.step_time:
                process.rate = (event.step - before) / (begun - process.step_time)
            process.step, process.step_time = event.step, begun

    def _process(self, host: str, pid: int) -> Process:
        return self.processes.setdefault((host, pid), Process(host, pid))


def _order(process: Process) -> tuple[bool, int]:
    """Ranks first; a process without one behind them."""
    return process.rank < 0, process.rank
