"""What the launcher saw of a job whose script does not use `Wrapper`: starts, deaths, restarts.

The launcher of such a job restarts all processes together. A *round* is what it started together;
each is reported like an iteration.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from outlast.events import Event, WorkerExited, WorkerFailed, WorkerStarted
from outlast.events.report.history.stretches import Stretch
from outlast.events.report.intervals import Interval
from outlast.events.report.model import Cause, Phases, Restart
from outlast.system.error_text import exit_summary


@dataclasses.dataclass
class Round:
    """The processes that one launcher started together."""

    host: str
    started: list[WorkerStarted] = dataclasses.field(default_factory=list)
    exited: list[WorkerExited] = dataclasses.field(default_factory=list)
    failed: list[WorkerFailed] = dataclasses.field(default_factory=list)

    @property
    def begin(self) -> float:
        """When the first process was started."""
        return min(event.time for event in self.started)

    @property
    def start(self) -> float:
        """When the last process was started."""
        return max(event.time for event in self.started)

    def end(self, last: float) -> float:
        """When the first process failed, or the last one ended; `last` if none did."""
        failures = [event.time for event in self.exited if event.exit_code != 0]
        ends = [event.time for event in self.exited]
        return max(self.start, min(failures, default=max(ends, default=last)))

    def causes(self) -> list[WorkerFailed]:
        """The failures that the launcher did not cause itself, the first cause first."""
        return sorted(self.failed, key=lambda event: event.failed_time)


class LauncherHistory:
    """The rounds of each launcher's host, from its events."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = sorted(events, key=lambda event: event.time)
        self._ends = {event.host: event.time for event in events}
        self._origins: dict[str, float] = {}
        for event in events:
            self._origins.setdefault(event.host, event.time)
        by_attempt: dict[str, dict[int, Round]] = defaultdict(dict)
        of_process: dict[tuple[str, int], Round] = {}
        for event in events:
            if isinstance(event, WorkerStarted):
                round_ = by_attempt[event.host].setdefault(event.attempt, Round(event.host))
                round_.started.append(event)
                of_process[event.host, event.worker_pid] = round_
            elif isinstance(event, WorkerExited | WorkerFailed):
                known = of_process.get((event.host, event.worker_pid))
                if known is not None and isinstance(event, WorkerExited):
                    known.exited.append(event)
                elif known is not None and isinstance(event, WorkerFailed):
                    known.failed.append(event)
        self.rounds = {
            host: [rounds[attempt] for attempt in sorted(rounds)]
            for host, rounds in by_attempt.items()
        }

    @property
    def world_size(self) -> int:
        """The largest number of processes started together, over all hosts."""
        return sum(max(len(r.started) for r in rounds) for rounds in self.rounds.values())

    @property
    def completed(self) -> int:
        """The number of processes of the last round that ended with exit code 0."""
        return sum(
            event.exit_code == 0 for rounds in self.rounds.values() for event in rounds[-1].exited
        )

    def segments(self) -> list[dict[str, float]]:
        """When each round began, on each host."""
        return [
            {
                host: rounds[number].begin
                for host, rounds in self.rounds.items()
                if number < len(rounds)
            }
            for number in range(max(map(len, self.rounds.values()), default=0))
        ]

    def stretches(self) -> dict[str, list[Stretch]]:
        """The time in which all processes of a host were running, for each round."""
        return {
            host: [
                Stretch(each.start, each.end(self._ends[host]), iteration=number)
                for number, each in enumerate(rounds)
            ]
            for host, rounds in self.rounds.items()
        }

    def walls(self) -> dict[str, list[Interval]]:
        """From the start of the first round to the end of the last process."""
        return {
            host: [(rounds[0].start, max(self._ends_of(rounds), default=self._ends[host]))]
            for host, rounds in self.rounds.items()
        }

    def restarts(self, stopped: bool) -> list[Restart]:
        """The failure of each round; but not of the last one if the job was told to stop."""
        found = []
        for rounds in self.rounds.values():
            for number, each in enumerate(rounds):
                following = rounds[number + 1] if number + 1 < len(rounds) else None
                causes = each.causes()
                if causes and (following is not None or not stopped):
                    found.append(self._restart(number, each, causes, following))
        return sorted(found, key=lambda restart: restart.at)

    def _restart(
        self, number: int, each: Round, causes: Sequence[WorkerFailed], following: Round | None
    ) -> Restart:
        end = each.end(self._ends[each.host])
        total = None if following is None else max(0.0, following.start - end)
        first, *others = [self._cause(event) for event in causes]
        return Restart(
            call=0,
            iteration=number,
            at=end - self._origins[each.host],
            cause=first,
            others=tuple(others),
            phases=Phases(total=total),
            world_size_before=len(each.started),
            world_size_after=0 if following is None else len(following.started),
            resumed=following is not None,
        )

    def _cause(self, event: WorkerFailed) -> Cause:
        return Cause(
            rank=event.rank,
            member=-1,
            host=event.host,
            interruption="WORKER_FAILED",
            message=event.message,
            exit=exit_summary(event.exit_code),
            at=event.time - self._origins[event.host],
            pid=event.worker_pid,
            launcher_rank=event.rank,
        )

    def _ends_of(self, rounds: Sequence[Round]) -> list[float]:
        return [event.time for event in rounds[-1].exited]
