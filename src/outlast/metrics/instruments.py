"""The metrics: name, kind, unit, labels. Prometheus and OpenTelemetry export the same ones.

Every label has few values, which do not grow with the length of a run: states, phases and kinds of
faults are fixed lists, and hosts are those of the job. Messages, ranks and process IDs are never
labels.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, field


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


TIME = Instrument(
    "outlast_time_seconds",
    Kind.COUNTER,
    "s",
    "Wall time of the host since the training function was first entered, by what it was used for.",
    ("host", "state"),
)
RESTARTS = Instrument(
    "outlast_restarts",
    Kind.COUNTER,
    "{restart}",
    "Restarts after which the function was entered again, by kind of the first fault.",
    ("cause",),
)
RECOVERY = Instrument(
    "outlast_recovery_seconds",
    Kind.HISTOGRAM,
    "s",
    "Duration of each phase of a restart (of the slowest survivor), and of all of it (total).",
    ("phase",),
)
STEPS_REDONE = Instrument(
    "outlast_steps_redone",
    Kind.COUNTER,
    "{step}",
    "Completed training steps that a restore discarded.",
)
CHECKPOINT_BLOCKED = Instrument(
    "outlast_checkpoint_blocked_seconds",
    Kind.HISTOGRAM,
    "s",
    "How long a save blocked training: one observation for each save and rank.",
)
CHECKPOINT_AGE = Instrument(
    "outlast_checkpoint_age_seconds",
    Kind.GAUGE,
    "s",
    "Time since the newest committed save began: the work that a restore of it would discard.",
)
CHECKPOINTS = Instrument(
    "outlast_checkpoints",
    Kind.COUNTER,
    "{checkpoint}",
    "Saves, by result: committed, failed.",
    ("result",),
)
CHECKPOINT_STEP = Instrument(
    "outlast_checkpoint_step", Kind.GAUGE, "{step}", "Step of the newest committed checkpoint."
)
MEMBERS = Instrument(
    "outlast_members",
    Kind.GAUGE,
    "{process}",
    "Processes of the job, by state: active, restarting, reserve, joining, lost (so far).",
    ("host", "state"),
)
STEP = Instrument("outlast_step", Kind.GAUGE, "{step}", "Newest training step that was recorded.")
GOODPUT = Instrument(
    "outlast_goodput_ratio",
    Kind.GAUGE,
    "1",
    "Productive time divided by wall time, since the beginning of the run.",
    ("host",),
)
RUN = Instrument(
    "outlast_run_info", Kind.GAUGE, "", "Always 1; the label is the name of the run.", ("run",)
)
DAMAGED_LINES = Instrument(
    "outlast_damaged_log_lines",
    Kind.COUNTER,
    "{line}",
    "Lines of event logs that are not events; they are skipped.",
)

INSTRUMENTS = (
    *(TIME, RESTARTS, RECOVERY, STEPS_REDONE),
    *(CHECKPOINT_BLOCKED, CHECKPOINT_AGE, CHECKPOINTS, CHECKPOINT_STEP),
    *(MEMBERS, STEP, GOODPUT, RUN, DAMAGED_LINES),
)

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The upper bounds of a histogram's buckets, in seconds."""

TIME_STATES = (
    *("productive", "restart", "replacements", "hang", "setup", "saves", "redone", "reduced"),
)
MEMBER_STATES = ("active", "restarting", "reserve", "joining", "lost")


@dataclass
class Histogram:
    """Observations so far: their number in each bucket, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds an observation."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """The buckets as Prometheus wants them: upper bound, and the number of those up to it."""
        found, count = [], 0
        for bound, here in zip((*map(repr, BOUNDS), "+Inf"), self.counts, strict=True):
            count += here
            found.append((bound, float(count)))
        return found
