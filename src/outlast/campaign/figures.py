"""The faults that a job has fired, and what each has cost, from its events.

All processes of a round run on one host, so that the times of the faults and of the events are
those of one clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.campaign.plan import RoundPlan
from outlast.campaign.results import Fired
from outlast.chaos.fired_faults import MarkerDirectory
from outlast.events.event import Event
from outlast.events.report import Report, Restart, build
from outlast.events.run_folders import events_of, runs_in
from outlast.events.types import CheckpointCommitted, CheckpointFailed, CheckpointRestored

_UNKNOWN = "it is not known whether"
"""In the cause of a save whose rank 0 may have committed it before it died."""
_WITHOUT_RESTART = ("slow_disk", "torn_write", "flipped_byte", "signal_storm")
"""Kinds that training does not notice, or only by the damage that a later restore finds."""
DAMAGING = ("torn_write", "flipped_byte")
"""Kinds after which a committed checkpoint may be damaged: a restore must pass over it."""
_LONGEST_S = 10.0
"""The time from a fault to its restart: more than the hard timeout of the training."""
_MOMENT_S = 0.5
_BEFORE_S = 0.05
"""How much earlier than its own record a fault may be seen: the record is written first."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """The events of one launcher's job, their report, and the time of the first event."""

    events: Sequence[Event]
    report: Report
    origin: float


def read_stages(folder: Path) -> list[Stage]:
    """The jobs of the launchers of a round, in order."""
    stages = []
    for run in runs_in(folder):
        events = events_of(run)
        origin = min((e.time for e in events if e.time > 0), default=0.0)
        stages.append(Stage(events, build(events), origin))
    return stages


def fired_faults(plan: RoundPlan, records: Path, stages: Sequence[Stage]) -> list[Fired]:
    """The faults inside the ranks that have fired, each with the restart that it has caused."""
    every = MarkerDirectory(records).records()
    fired = [one for one in every if str(one.get("key", "")).startswith("planned-")]
    restarts = [
        (stage.origin + restart.at, restart)
        for stage in stages
        for restart in stage.report.restarts
    ]
    caused = {
        index: (at, restart)
        for at, restart in reversed(restarts)  # of several, the first one counts
        if (index := _cause_of(at, restart, fired)) is not None
    }
    alone = _alone(fired, caused)
    found = []
    for index, record in enumerate(fired):
        fault = plan.faults[int(record["key"].removeprefix("planned-"))]
        one = Fired(
            kind=record["kind"], phase=fault.phase.value, rank=record["rank"], step=record["step"]
        )
        if index in caused:
            seen_at, restart = caused[index]
            since = seen_at - float(record["time"])
            one = dataclasses.replace(
                one,
                seen=_after(since, restart.phases.detection),
                back=_after(since, restart.phases.total),
                redone=restart.redone_steps,
                named=_names(restart, record) if index in alone else None,
            )
        found.append(one)
    return found


def _alone(
    fired: Sequence[dict[str, Any]], caused: Mapping[int, tuple[float, Restart]]
) -> set[int]:
    """The faults that have caused a restart by themselves: while each was not seen yet, no other
    fault was, and the job had recovered from those before.
    """

    def over(index: int) -> float:
        if index not in caused:
            return float(fired[index]["time"]) + _LONGEST_S
        at, restart = caused[index]
        return at + (_LONGEST_S if restart.phases.total is None else restart.phases.total)

    felt = [i for i, record in enumerate(fired) if record["kind"] not in _WITHOUT_RESTART]
    return {
        index
        for index, (at, _) in caused.items()
        if all(
            other == index
            or float(fired[other]["time"]) > at
            or over(other) < float(fired[index]["time"])
            for other in felt
        )
    }


def _names(restart: Restart, record: dict[str, Any]) -> bool:
    """Whether the first cause that was told is the process in which the fault was, or tells of its
    rank: a failed save is an error on all ranks.
    """
    cause = restart.cause
    return cause is not None and (
        cause.pid == record["pid"] or f" failed on rank {record['rank']} on " in cause.message
    )


def unexplained(records: Path, stages: Sequence[Stage]) -> list[str]:
    """The restarts before which there was no fault: the rank and the cause that they name."""
    times = [float(record["time"]) for record in MarkerDirectory(records).records()]
    return [
        f"rank {restart.cause.rank}: {restart.cause.message}"
        for stage in stages
        for restart in stage.report.restarts
        if restart.cause is not None
        and not any(-_BEFORE_S <= stage.origin + restart.at - time <= _LONGEST_S for time in times)
    ]


def _cause_of(at: float, restart: Restart, fired: Sequence[dict[str, Any]]) -> int | None:
    """The fault that has caused a restart: the last one before it of the process that its report
    names first; otherwise the last one before it at all, if that was a moment ago.
    """
    before = {
        index: at - float(record["time"])
        for index, record in enumerate(fired)
        if record["kind"] not in _WITHOUT_RESTART and float(record["time"]) <= at + _BEFORE_S
    }
    for cause in filter(None, (restart.cause, *restart.others)):
        ages = {i: age for i, age in before.items() if fired[i]["pid"] == cause.pid}
        if ages and min(ages.values()) <= _LONGEST_S:
            return min(ages, key=ages.__getitem__)
    recent = {index: age for index, age in before.items() if age <= _MOMENT_S}
    return min(recent, key=recent.__getitem__, default=None)


def believed_partial(stages: Sequence[Stage]) -> list[str]:
    """Checkpoints restored from storage although their save has failed.

    A process that dies after the commit has no event of it. So a checkpoint without any event may
    have been committed, as may one of which the ranks say that they do not know.
    """
    events = [event for stage in stages for event in stage.events]
    committed = {e.step for e in events if isinstance(e, CheckpointCommitted)}
    failures = [e for e in events if isinstance(e, CheckpointFailed)]
    unknown = {e.step for e in failures if _UNKNOWN in e.cause}
    restored = {
        e.step for e in events if isinstance(e, CheckpointRestored) and e.source == "storage"
    }
    wrong = restored & {e.step for e in failures} - committed - unknown
    return [f"step {step} was restored from storage; its save had failed" for step in sorted(wrong)]


def _after(since: float, length: float | None) -> float | None:
    return None if length is None else max(0.0, since + length)


def job_times(stages: Sequence[Stage]) -> tuple[float, float]:
    """Wall time and productive time over all stages, of the host with the longest wall time."""
    wall = productive = 0.0
    for stage in stages:
        longest = max(stage.report.hosts, key=lambda host: host.wall_seconds, default=None)
        if longest is not None:
            wall += longest.wall_seconds
            productive += longest.productive_seconds
    return wall, productive
