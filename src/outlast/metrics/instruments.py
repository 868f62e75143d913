"""The metrics: name, kind, unit, labels. Prometheus and OpenTelemetry export the same ones.

Every label has few values, which do not grow with the length of a run: states, phases and kinds of
faults are fixed lists, and hosts are those of the job. Messages, ranks and process IDs are never
labels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an instrument's values mean."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Instrument:
    """One metric.

    Attributes:
        name: the name in Prometheus, without the `_total` of a counter.
        unit: as in UCUM: `s`, `1` for a ratio, `{step}`.
        labels: the names of its labels.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()

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


def _counter(name: str, unit: str, about: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, unit, about, labels)


def _gauge(name: str, unit: str, about: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, unit, about, labels)


def _histogram(name: str, about: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, "s", about, labels)


TIME = _counter(
    "outlast_time_seconds",
    "s",
    "Wall time of the host since the training function was first entered, by what it was used for.",
    *("host", "state"),
)
RESTARTS = _counter(
    "outlast_restarts",
    "{restart}",
    "Restarts after which the function was entered again, by kind of the first fault.",
    "cause",
)
RECOVERY = _histogram(
    "outlast_recovery_seconds",
    "Duration of each phase of a restart (of the slowest survivor), and of all of it (total).",
    "phase",
)
STEPS_REDONE = _counter(
    "outlast_steps_redone", "{step}", "Completed training steps that a restore discarded."
)
CHECKPOINT_BLOCKED = _histogram(
    "outlast_checkpoint_blocked_seconds",
    "How long a save blocked training: one observation for each save and rank.",
)
CHECKPOINT_AGE = _gauge(
    "outlast_checkpoint_age_seconds",
    "s",
    "Time since the newest committed save began: the work that a restore of it would discard.",
)
CHECKPOINTS = _counter(
    "outlast_checkpoints", "{checkpoint}", "Saves, by result: committed, failed.", "result"
)
CHECKPOINT_STEP = _gauge(
    "outlast_checkpoint_step", "{step}", "Step of the newest committed checkpoint."
)
MEMBERS = _gauge(
    "outlast_members",
    "{process}",
    "Processes that take part in the job, by state: active, restarting, reserve, joining.",
    *("host", "state"),
)
MEMBERS_LOST = _counter(
    "outlast_members_lost", "{process}", "Processes that the job has lost.", "host"
)
STEP = _gauge("outlast_step", "{step}", "Newest training step that was recorded.")
GOODPUT = _gauge(
    "outlast_goodput_ratio",
    "1",
    "Productive time divided by wall time, since the beginning of the run.",
    "host",
)
RUN = _gauge("outlast_run_info", "", "Always 1; the label is the name of the run.", "run")
DAMAGED_LINES = _counter(
    "outlast_damaged_log_lines",
    "{line}",
    "Lines of event logs that are not events; they are skipped.",
)

INSTRUMENTS = (
    *(TIME, RESTARTS, RECOVERY, STEPS_REDONE),
    *(CHECKPOINT_BLOCKED, CHECKPOINT_AGE, CHECKPOINTS, CHECKPOINT_STEP),
    *(MEMBERS, MEMBERS_LOST, STEP, GOODPUT, RUN, DAMAGED_LINES),
)

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The upper bounds of a histogram's buckets, in seconds."""

MEMBER_STATES = ("active", "restarting", "reserve", "joining")
