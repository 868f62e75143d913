"""The metrics: name, kind, unit, labels. Prometheus and OpenTelemetry export the same ones.

Every label has few values, which do not grow with the length of a run: states, phases and kinds of
faults are fixed lists, and hosts are those of the job. Messages, ranks and process IDs are never
labels.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


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
        *("outlast_time_seconds", _C, "s"),
        "Wall time of the host since the training function was first entered, by its use.",
        ("host", "state"),
    ),
    RESTARTS := Instrument(
        *("outlast_restarts", _C, "{restart}"),
        "Restarts after which the function was entered again, by kind of the first fault.",
        ("cause",),
    ),
    RECOVERY := Instrument(
        *("outlast_recovery_seconds", _H, "s"),
        "Duration of each phase of a restart (of the slowest survivor), and of all of it (total).",
        ("phase",),
    ),
    STEPS_REDONE := Instrument(
        *("outlast_steps_redone", _C, "{step}"),
        "Completed training steps that a restore discarded.",
    ),
    CHECKPOINT_BLOCKED := Instrument(
        *("outlast_checkpoint_blocked_seconds", _H, "s"),
        "How long a save blocked training: one observation for each save and rank.",
    ),
    CHECKPOINT_AGE := Instrument(
        *("outlast_checkpoint_age_seconds", _G, "s"),
        "Time since the newest committed save began: the work that a restore of it would discard.",
    ),
    CHECKPOINTS := Instrument(
        *("outlast_checkpoints", _C, "{checkpoint}"),
        "Saves, by result: committed, failed.",
        ("result",),
    ),
    CHECKPOINT_STEP := Instrument(
        "outlast_checkpoint_step", _G, "{step}", "Step of the newest committed checkpoint."
    ),
    MEMBERS := Instrument(
        *("outlast_members", _G, "{process}"),
        "Processes that take part in the job, by state: active, restarting, reserve, joining.",
        ("host", "state"),
    ),
    MEMBERS_LOST := Instrument(
        *("outlast_members_lost", _C, "{process}"), "Processes that the job has lost.", ("host",)
    ),
    STEP := Instrument("outlast_step", _G, "{step}", "Newest training step that was recorded."),
    GOODPUT := Instrument(
        *("outlast_goodput_ratio", _G, "1"),
        "Productive time divided by wall time, since the beginning of the run.",
        ("host",),
    ),
    RUN := Instrument(
        "outlast_run_info", _G, "", "Always 1; the label is the name of the run.", ("run",)
    ),
    DAMAGED_LINES := Instrument(
        *("outlast_damaged_log_lines", _C, "{line}"),
        "Lines of event logs that are not events; they are skipped.",
    ),
)

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The upper bounds of a histogram's buckets, in seconds."""

MEMBER_STATES = ("active", "restarting", "reserve", "joining")
