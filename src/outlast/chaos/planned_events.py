"""The events about the plan of a job: which of its faults have fired, and which never came due."""

from __future__ import annotations

from pathlib import Path

from outlast.chaos.fired_faults import MarkerDirectory
from outlast.chaos.kinds import Phase
from outlast.chaos.plan import Plan, PlannedFault
from outlast.events import PlannedFault as PlannedFaultEvent
from outlast.system.arguments import seconds


def planned_events(plan: Path, state: Path) -> list[PlannedFaultEvent]:
    """One event for each planned fault, and for each random one that fired.

    Args:
        plan: the plan of the job.
        state: the directory of its fired faults, after the end of the job.

    Raises:
        ChaosError: if the plan is not valid any more, or the directory cannot be used.
    """
    records = {record["key"]: record for record in MarkerDirectory(state).records() if record}
    planned = {f"planned-{index}": fault for index, fault in enumerate(Plan.load(plan).faults)}
    events = [
        PlannedFaultEvent(key=key, name=fault.kind.value, rank=fault.rank, due=_due(fault))
        for key, fault in planned.items()
        if key not in records
    ]
    for key, record in records.items():
        events.append(
            PlannedFaultEvent(
                key=key,
                name=record["kind"],
                rank=record["rank"],
                iteration=record["iteration"],
                host=record["host"],
                pid=record["pid"],
                time=record["time"],
                due=_due(planned[key]) if key in planned else "random",
                fired=True,
            )
        )
    return events


def _due(fault: PlannedFault) -> str:
    """The conditions of the fault, in words."""
    after = None if fault.after_seconds is None else f"{seconds(fault.after_seconds):g} s"
    phase = None if fault.phase is Phase.STEP else str(fault.phase.value)
    conditions = {
        "iteration": fault.iteration,
        "step": fault.step,
        "after": after,
        "phase": phase,
    }
    return ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None)
