"""The faults that a job has fired, and what each has cost, from its events.

All processes of a round run on one host, so that the times of the faults and of the events are
those of one clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from outlast.campaign.plan import RoundPlan
from outlast.campaign.results import Fired
from outlast.chaos import MarkerDirectory
from outlast.events import CheckpointCommitted, CheckpointFailed, CheckpointRestored, Event
from outlast.events.report import Report, Restart, build, load_run
from outlast.events.run_folders import runs_in

_UNKNOWN = "it is not known whether"
"""In the cause of a save whose rank 0 may have committed it before it died."""
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
        events = load_run(run)
        origin = min((e.time for e in events if e.time > 0), default=0.0)
        stages.append(Stage(events, build(events), origin))
    return stages


def fired_faults(plan: RoundPlan, records: Path, stages: Sequence[Stage]) -> list[Fired]:
    """The faults inside the ranks that have fired, each with the restart that followed it."""
    found = []
    blamed: set[int] = set()
    for record in MarkerDirectory(records).records():
        key = str(record.get("key", ""))
        if not key.startswith("planned-"):
            continue
        fault = plan.faults[int(key.removeprefix("planned-"))]
        at = float(record["time"])
        one = Fired(
            kind=record["kind"], phase=fault.phase.value, rank=record["rank"], step=record["step"]
        )
        match = _restart_after(at, int(record["pid"]), stages)
        if match is not None:
            origin, restart = match
            redone = None if id(restart) in blamed else restart.redone_steps
            blamed.add(id(restart))
            one = dataclasses.replace(
                one,
                seen=_since(at, origin, restart, restart.phases.detection),
                back=_since(at, origin, restart, restart.phases.total),
                redone=redone,
            )
        found.append(one)
    return found


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


def _restart_after(at: float, pid: int, stages: Sequence[Stage]) -> tuple[float, Restart] | None:
    """The restart that a fault has caused: the first after it that names its process; otherwise the
    first after it, if the process is not named in any.
    """
    later = [
        (stage.origin, restart)
        for stage in stages
        for restart in stage.report.restarts
        if restart.at + stage.origin >= at - _BEFORE_S
    ]
    for origin, restart in later:
        causes = (*restart.others, *([restart.cause] if restart.cause else []))
        if any(cause.pid == pid for cause in causes):
            return origin, restart
    return None


def _since(at: float, origin: float, restart: Restart, length: float | None) -> float | None:
    return None if length is None else max(0.0, restart.at + origin + length - at)


def job_times(stages: Sequence[Stage]) -> tuple[float, float]:
    """Wall time and productive time over all stages, of the host with the longest wall time."""
    wall = productive = 0.0
    for stage in stages:
        longest = max(stage.report.hosts, key=lambda host: host.wall_seconds, default=None)
        if longest is not None:
            wall += longest.wall_seconds
            productive += longest.productive_seconds
    return wall, productive
