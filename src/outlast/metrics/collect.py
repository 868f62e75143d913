"""The values of all instruments for a run, taken whenever somebody asks for them.

A counter never decreases, or Prometheus would take it for one of a new process. But some time is
recognized as lost only afterwards: a hang at its timeout, redone work at the restore. What was
counted as productive until then is too much; the counter stands still until the truth has caught up
with it. After that, the division of time is the report's again.

For the same reason, a restart is counted once the job is in the function again: until then, the
report may still find an earlier cause.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.events import CheckpointCommitted, CheckpointFailed, Event
from outlast.events.report import PHASE_FIELDS, Cause, HostTime, Report, Restart
from outlast.metrics import instruments
from outlast.metrics.instruments import MEMBER_STATES, Histogram, Instrument
from outlast.metrics.live_run import LiveRun
from outlast.metrics.run_state import State

Labels = tuple[str, ...]

ELSEWHERE = "elsewhere"
"""The cause of a restart whose first fault is in no log that was read: it is on another host."""

PHASES = tuple(PHASE_FIELDS)

_MEMBER_STATES = {
    State.RUNNING: "active",
    State.RETURNED: "active",
    State.RESTARTING: "restarting",
    State.RESERVE: "reserve",
    State.STARTING: "joining",
    State.WAITING: "joining",
    State.LOST: "lost",
}


@dataclass(frozen=True)
class Values:
    """The values of all instruments at one moment, by their labels."""

    numbers: Mapping[Instrument, Mapping[Labels, float]]
    histograms: Mapping[Instrument, Mapping[Labels, Histogram]]


class Listener:
    """Hears what a collector finds, in the thread that polls; does nothing by itself."""

    def event(self, event: Event) -> None:
        """An event was read."""

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        """A histogram has a new observation."""

    def restarted(self, restart: Restart) -> None:
        """A restart is over, and was counted."""


class Collector:
    """Takes the values of a run. Any thread may ask.

    Args:
        run: the run, which only this collector polls.
        listener: hears what is found.
    """

    def __init__(self, run: LiveRun, *, listener: Listener | None = None) -> None:
        self._run = run
        self._listener = Listener() if listener is None else listener
        self._lock = threading.Lock()
        self._counters: dict[tuple[Instrument, Labels], float] = {}
        self._histograms: dict[Instrument, dict[Labels, Histogram]] = {
            instruments.RECOVERY: {(phase,): Histogram() for phase in PHASES},
            instruments.CHECKPOINT_BLOCKED: {(): Histogram()},
        }
        self._counted: set[tuple[int, int, str]] = set()
        self._restarts: Counter[str] = Counter()

    def values(self, *, poll: bool = True) -> Values:
        """The values now; without `poll`, from the events that were read before.

        Raises:
            OSError: if the folder of the run cannot be read.
        """
        with self._lock:
            if poll:
                self._poll()
            return Values(self._numbers(self._run.report()), self._histograms)

    def poll(self) -> None:
        """Reads what is new, and makes the calls for new restarts and observations.

        Raises:
            OSError: if the folder of the run cannot be read.
        """
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        new = self._run.poll()
        for event in new:
            self._listener.event(event)
            if isinstance(event, CheckpointCommitted | CheckpointFailed):
                self._observe(instruments.CHECKPOINT_BLOCKED, (), event.blocked_seconds)
        if not new and self._run.up_to_date and not self._run.over():
            return
        report = self._run.report()
        for restart in report.restarts:
            # Without `Wrapper`, the launcher of each host restarts its processes by itself.
            by_host = report.source == "launcher" and restart.cause is not None
            host = restart.cause.host if by_host and restart.cause is not None else ""
            key = restart.call, restart.iteration, host
            if key not in self._counted and self._is_over(restart):
                self._counted.add(key)
                self._count(restart)

    def _is_over(self, restart: Restart) -> bool:
        """Whether the job is in the function again, on all that is known, or has ended."""
        if self._run.over():
            return True
        return restart.resumed and not any(
            process.state is State.RESTARTING and process.iteration <= restart.iteration + 1
            for process in self._run.state.processes.values()
            if not process.over
        )

    def _count(self, restart: Restart) -> None:
        self._restarts[cause_label(restart)] += 1
        for phase, name in PHASE_FIELDS.items():
            seconds = getattr(restart.phases, name)
            if seconds is not None:
                self._observe(instruments.RECOVERY, (phase,), seconds)
        self._listener.restarted(restart)

    def _observe(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        self._histograms[instrument][labels].observe(seconds)
        self._listener.observed(instrument, labels, seconds)

    def _numbers(self, report: Report) -> dict[Instrument, dict[Labels, float]]:
        run, saves = self._run, self._run.state.checkpoints
        found: dict[Instrument, dict[Labels, float]] = {
            instruments.RUN: {(run.name,): 1.0},
            instruments.RESTARTS: {(cause,): float(n) for cause, n in self._restarts.items()},
            instruments.STEPS_REDONE: {(): _redone(report)},
            instruments.CHECKPOINTS: {
                ("committed",): float(saves.committed),
                ("failed",): float(saves.failed),
            },
            instruments.DAMAGED_LINES: {(): float(run.damaged_lines)},
            instruments.MEMBERS: self._members(),
            instruments.TIME: {},
            instruments.GOODPUT: {},
        }
        for host in report.hosts:
            for state, seconds in time_states(host).items():
                found[instruments.TIME][host.host, state] = seconds
            if host.goodput is not None:
                found[instruments.GOODPUT][host.host,] = host.goodput
        ages = []
        for name, newest in saves.newest.items():
            now = run.now(name)
            if now is not None:
                ages.append((name != run.own_host, max(0.0, now - newest.time + newest.seconds)))
        if ages:
            found[instruments.CHECKPOINT_AGE] = {(): min(ages)[1]}
            step = max(event.step for event in saves.newest.values())
            found[instruments.CHECKPOINT_STEP] = {(): float(step)}
        steps = [p.step for p in run.state.current if p.step is not None]
        if steps:
            found[instruments.STEP] = {(): float(max(steps))}
        return {
            instrument: {
                labels: self._monotonic(instrument, labels, value)
                for labels, value in values.items()
            }
            for instrument, values in found.items()
        }

    def _monotonic(self, instrument: Instrument, labels: Labels, value: float) -> float:
        if instrument.kind is not instruments.Kind.COUNTER:
            return value
        highest = max(value, self._counters.get((instrument, labels), 0.0))
        self._counters[instrument, labels] = highest
        return highest

    def _members(self) -> dict[Labels, float]:
        processes = self._run.state.processes.values()
        counts = Counter(
            (process.host, _MEMBER_STATES[process.state])
            for process in processes
            if process.state in _MEMBER_STATES
        )
        hosts = sorted({process.host for process in processes})
        return {
            (host, state): float(counts[host, state]) for host in hosts for state in MEMBER_STATES
        }


def time_states(host: HostTime) -> dict[str, float]:
    """The wall time of a host by its use; the parts add up to it."""
    lost = host.lost
    return {
        "productive": host.productive_seconds,
        "restart": lost.restart - lost.replacements,
        "replacements": lost.replacements,
        "hang": lost.hang,
        "setup": lost.setup,
        "saves": lost.saves,
        "redone": lost.redone,
        "reduced": lost.reduced,
    }


def cause_label(restart: Restart) -> str:
    """The kind of the first fault, one of a few; never its message."""
    cause: Cause | None = restart.cause
    if cause is None or cause.consequence:
        return "joined" if restart.joined and not restart.lost else ELSEWHERE
    return cause.interruption.lower()


def _redone(report: Report) -> float:
    return float(sum(restart.redone_steps or 0 for restart in report.restarts))
