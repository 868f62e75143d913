"""What the launcher saw of a job whose script does not use `Wrapper`: starts, deaths, restarts.

The launcher of such a job restarts all processes together. A *round* is what it started together;
each is reported like an iteration.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import outlast.events as ev
from outlast.events.report.figures.stretches import Course, Ended, Stretch
from outlast.events.report.model import Cause, Phases, Restart
from outlast.events.report.one_pass import Process, Run, record
from outlast.system.error_text import exit_summary


@dataclasses.dataclass
class Round:
    """The processes that one launcher started together."""

    host: str
    last: float  # the last event of the host
    started: list[ev.WorkerStarted] = dataclasses.field(default_factory=list)
    exited: list[ev.WorkerExited] = dataclasses.field(default_factory=list)
    failed: list[ev.WorkerFailed] = dataclasses.field(default_factory=list)

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


def rounds_of(run: Run) -> dict[str, list[Round]]:
    """The rounds of each launcher's host, in order."""
    found: dict[str, dict[int, Round]] = defaultdict(dict)
    processes: dict[Process, Round] = {}
    for event in run.any_of(ev.WorkerStarted, ev.WorkerExited, ev.WorkerFailed):
        if isinstance(event, ev.WorkerStarted):
            fresh = Round(event.host, run.ends[event.host])
            one = found[event.host].setdefault(event.attempt, fresh)
            one.started.append(event)
            processes[event.host, event.worker_pid] = one
        elif isinstance(event, ev.WorkerExited | ev.WorkerFailed):
            known = processes.get((event.host, event.worker_pid))
            if known is not None and isinstance(event, ev.WorkerExited):
                known.exited.append(event)
            elif known is not None and isinstance(event, ev.WorkerFailed):
                known.failed.append(event)
    return {host: [each[number] for number in sorted(each)] for host, each in found.items()}


def course_of_rounds(rounds: dict[str, list[Round]], stopped: bool) -> Course:
    """The course of the job; the failures of the last round are none if the job was stopped."""
    ended: list[Ended] = []
    for each in rounds.values():
        for number, one in enumerate(each):
            following = each[number + 1] if number + 1 < len(each) else None
            if one.failed and (following is not None or not stopped):
                ended.append(Ended(_restart(number, one, following), number))
    number = max(map(len, rounds.values()), default=0)
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
            host: [Stretch(one.start, one.end, iteration=n) for n, one in enumerate(each)]
            for host, each in rounds.items()
        },
        walls={
            host: [(each[0].start, max((e.time for e in each[-1].exited), default=each[0].last))]
            for host, each in rounds.items()
        },
    )


def _restart(number: int, one: Round, following: Round | None) -> Restart:
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
