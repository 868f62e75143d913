"""The metrics of a run, and their values whenever they are asked for. Prometheus and OpenTelemetry
export the same ones.

Every label has few values, which do not grow with the length of a run: states, phases and kinds of
faults are fixed lists, and hosts are those of the job. Messages, ranks and process IDs are never
labels.

A counter never decreases, or Prometheus would take it for one of a new process. But some time is
recognized as lost only afterwards: a hang at its timeout, redone work at the restore. What was
counted as productive until then is too much; the counter stands still until the truth has caught up
with it. After that, the division of time is the report's again.

For the same reason, a restart is counted once the job is in the function again: until then, the
report may still find an earlier cause.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from outlast.events.report import PHASE_FIELDS, HostTime, Restart, parts_of
from outlast.events.types import CheckpointCommitted, CheckpointFailed
from outlast.metrics.live_run import LiveRun
from outlast.metrics.run_state import State


class Kind(enum.Enum):
    """What an instrument's values mean."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Instrument(NamedTuple):
    """One metric."""

    name: str  # the name in Prometheus, without the `_total` of a counter
    kind: Kind
    unit: str  # as in UCUM: `s`, `1` for a ratio, `{step}`
    help: str
    labels: tuple[str, ...] = ()  # the names of its labels

    @property
    def prometheus_name(self) -> str:
        """The name of its series; a histogram's have `_bucket`, `_sum` and `_count` appended."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def opentelemetry_name(self) -> str:
        """The name in OpenTelemetry. A collector that translates it for Prometheus appends the unit
        and `_total`, and so arrives at the name above.
        """
        return self.name.removesuffix("_seconds").removesuffix("_ratio").replace("_", ".")


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

INSTRUMENTS = (
    TIME := Instrument(
        "outlast_time_seconds", _C, "s",
        "Wall time of the host since the training function was first entered, by its use.",
        ("host", "state"),
    ),
    RESTARTS := Instrument(
        "outlast_restarts", _C, "{restart}",
        "Restarts after which the function was entered again, by kind of the first fault.",
        ("cause",),
    ),
    RECOVERY := Instrument(
        "outlast_recovery_seconds", _H, "s",
        "Duration of each phase of a restart (of the slowest survivor), and of all of it (total).",
        ("phase",),
    ),
    STEPS_REDONE := Instrument(
        "outlast_steps_redone", _C, "{step}",
        "Completed training steps that a restore discarded.",
    ),
    CHECKPOINT_BLOCKED := Instrument(
        "outlast_checkpoint_blocked_seconds", _H, "s",
        "How long a save blocked training: one observation for each save and rank.",
    ),
    CHECKPOINT_AGE := Instrument(
        "outlast_checkpoint_age_seconds", _G, "s",
        "Time since the newest committed save began: the work that a restore of it would discard.",
    ),
    CHECKPOINTS := Instrument(
        "outlast_checkpoints", _C, "{checkpoint}",
        "Saves, by result: committed, failed.",
        ("result",),
    ),
    CHECKPOINT_STEP := Instrument(
        "outlast_checkpoint_step", _G, "{step}", "Step of the newest committed checkpoint."
    ),
    MEMBERS := Instrument(
        "outlast_members", _G, "{process}",
        "Processes that take part in the job, by state: active, restarting, reserve, joining.",
        ("host", "state"),
    ),
    MEMBERS_LOST := Instrument(
        "outlast_members_lost", _C, "{process}", "Processes that the job has lost.", ("host",)
    ),
    STEP := Instrument("outlast_step", _G, "{step}", "Newest training step that was recorded."),
    GOODPUT := Instrument(
        "outlast_goodput_ratio", _G, "1",
        "Productive time divided by wall time, since the beginning of the run.",
        ("host",),
    ),
    RUN := Instrument(
        "outlast_run_info", _G, "", "Always 1; the label is the name of the run.", ("run",)
    ),
    DAMAGED_LINES := Instrument(
        "outlast_damaged_log_lines", _C, "{line}",
        "Lines of event logs that are not events; they are skipped.",
    ),
)  # fmt: skip

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The upper bounds of a histogram's buckets, in seconds."""

Labels = tuple[str, ...]
Values = Mapping[Instrument, Mapping[Labels, float]]
"""The values of counters and gauges at one moment, by their labels."""

ELSEWHERE = "elsewhere"
"""The cause of a restart whose first fault is in no log that was read: it is on another host."""

_MEMBER_STATES = {
    State.RUNNING: "active",
    State.RETURNED: "active",
    State.RESTARTING: "restarting",
    State.RESERVE: "reserve",
    State.STARTING: "joining",
    State.WAITING: "joining",
}
MEMBER_STATES = tuple(dict.fromkeys(_MEMBER_STATES.values()))


class Listener:
    """Hears what a collector finds, in the thread that polls; does nothing by itself."""

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        """A histogram has a new observation."""

    def restarted(self, restart: Restart) -> None:
        """A restart is over and was counted, or a fault has ended the job."""


class Collector:
    """Takes the values of a run. Any thread may ask."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.listeners: list[Listener] = []  # hear what is found; added before the first poll
        self._lock = threading.RLock()
        self._counters: dict[tuple[Instrument, Labels], float] = {}
        self._counted: set[tuple[int, int, str]] = set()
        self._restarts: Counter[str] = Counter()

    def values(self, *, poll: bool = True) -> Values:
        """The values now; without `poll`, from the events that were read before."""
        with self._lock:
            if poll:
                self.poll()
            found = self._values()
            for instrument, values in found.items():
                if instrument.kind is Kind.COUNTER:
                    for labels, value in values.items():
                        highest = max(value, self._counters.get((instrument, labels), 0.0))
                        self._counters[instrument, labels] = values[labels] = highest
            return found

    def poll(self) -> None:
        """Reads what is new, and makes the calls for new restarts and observations."""
        with self._lock:
            new = self.run.poll()
            for event in new:
                if isinstance(event, CheckpointCommitted | CheckpointFailed):
                    self._observe(CHECKPOINT_BLOCKED, (), event.blocked_seconds)
            if not new and self.run.up_to_date and not self.run.over():
                return
            report = self.run.report()
            for restart in report.restarts:
                # Without `Wrapper`, the launcher of each host restarts its processes by itself.
                host = restart.cause.host if restart.cause and report.source == "launcher" else ""
                key = restart.call, restart.iteration, host
                if key not in self._counted and self._is_over(restart):
                    self._counted.add(key)
                    self._count(restart)

    def _is_over(self, restart: Restart) -> bool:
        """Whether the job is in the function again, on all that is known, or has ended."""
        return self.run.over() or (
            restart.resumed
            and not any(
                process.state is State.RESTARTING and process.iteration <= restart.iteration + 1
                for process in self.run.state.processes.values()
            )
        )

    def _count(self, restart: Restart) -> None:
        if restart.resumed:
            self._restarts[cause_label(restart)] += 1
        for phase, name in PHASE_FIELDS.items():
            seconds = getattr(restart.phases, name)
            if seconds is not None:
                self._observe(RECOVERY, (phase,), seconds)
        for listener in self.listeners:
            listener.restarted(restart)

    def _observe(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        for listener in self.listeners:
            listener.observed(instrument, labels, seconds)

    def _values(self) -> dict[Instrument, dict[Labels, float]]:
        run, state, report = self.run, self.run.state, self.run.report()
        processes = list(state.processes.values())
        hosts = sorted({process.host for process in processes})
        lost = Counter(process.host for process in processes if process.state is State.LOST)
        members = Counter((p.host, _MEMBER_STATES.get(p.state, "")) for p in processes)
        found: dict[Instrument, dict[Labels, float]] = {
            RUN: {(run.name,): 1.0},
            RESTARTS: {(cause,): float(n) for cause, n in self._restarts.items()},
            STEPS_REDONE: {(): float(sum(r.redone_steps or 0 for r in report.restarts))},
            CHECKPOINTS: {
                ("committed",): float(state.saves(CheckpointCommitted)),
                ("failed",): float(state.saves(CheckpointFailed)),
            },
            DAMAGED_LINES: {(): float(run.follower.damaged_lines)},
            MEMBERS: {(h, s): float(members[h, s]) for h in hosts for s in MEMBER_STATES},
            MEMBERS_LOST: {(host,): float(lost[host]) for host in hosts},
            TIME: {
                (host.host, use): seconds
                for host in report.hosts
                for use, seconds in time_states(host).items()
            },
            GOODPUT: {
                (host.host,): host.goodput for host in report.hosts if host.goodput is not None
            },
        }
        if state.newest_saves:
            step = max(event.step for event in state.newest_saves.values())
            found[CHECKPOINT_STEP] = {(): float(step)}
        if newest := run.newest_save():
            found[CHECKPOINT_AGE] = {(): newest[1]}
        steps = [process.step for process in state.current if process.step is not None]
        # A rank records its steps every few seconds; its page has each of them.
        pages = [page.step for page in map(run.progress, state.current) if page is not None]
        if steps or any(pages):
            found[STEP] = {(): float(max(*steps, *pages, 0))}
        return found


def time_states(host: HostTime) -> dict[str, float]:
    """The wall time of a host by its use; the parts add up to it."""
    parts = parts_of(host)
    parts["restart"] = parts.pop("restarts") + parts.pop("uneven")
    return parts


def cause_label(restart: Restart) -> str:
    """The kind of the first fault, one of a few; never its message."""
    if restart.cause is None or restart.cause.consequence:
        if restart.moved:
            return "moved"
        return "joined" if restart.joined and not restart.lost else ELSEWHERE
    return restart.cause.interruption.lower()
