"""The phases of a restart, from the event logs of the ranks.

For each fault and each step of the recovery: the time at which the *last* rank completed it. The
differences between these times are the phases; their sum is the restart latency.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

__all__ = ["STEPS", "Milestones", "medians", "milestones"]

STEPS = {
    "seen": "fault known",
    "abort": "in-flight work ended",
    "left_function": "out of the function",
    "finalize": "torch.distributed released",
    "barrier term": "everyone out",
    "assigned": "view agreed, ranks assigned",
    "barrier start": "store up, everyone ready",
    "entered": "in the function",
}

Milestones = dict[str, list[float]]


def milestones(folder: Path, spans: list[tuple[float, float]]) -> Milestones:
    """Seconds that each step added to each restart; `spans` are the times of fault and end."""
    events = sorted(_events(folder))
    added: Milestones = {step: [] for step in STEPS}
    for start, end in spans:
        reached = start
        for step in STEPS:
            times = [t for t, name in events if name == step and start < t <= end + 1e-3]
            now = end if step == "entered" else max([reached, *times])
            added[step].append(max(0.0, now - reached))
            reached = now
    return added


def medians(phases: Milestones) -> dict[str, float]:
    """The median of each step."""
    return {step: statistics.median(values) for step, values in phases.items() if values}


def _events(folder: Path) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line) if line.endswith("}") else {"kind": "torn"}
            kind = event["kind"]
            name = f"barrier {event['name']}" if kind == "barrier" else kind
            if name in STEPS:
                found.append((float(event["time"]), name))
    return found
