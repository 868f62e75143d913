"""What a fault costs if survivors keep the newest state, beside a checkpoint in memory or on disk.

Two ranks with DDP under `outlast run`, for a state (parameters and optimizer) of 1 MiB to 1 GiB.
"""

from __future__ import annotations

from typing import Any

from benchmarks.rollback.faults import measure
from benchmarks.rollback.limits import limits
from benchmarks.rollback.sheets import sheets
from benchmarks.rollback.step_cost import MODELS, step_cost
from benchmarks.rollback.ways import WAYS

__all__ = ["run", "sheets"]

_FAULTS = {1: 10, 128: 8, 1024: 4}
_QUICK = {1: 2, 16: 2}
_QUICK_WAYS = ("live", "cold")


def run(quick: bool) -> dict[str, Any]:
    """Measures the faults for each size and way, the limits, and the cost per step."""
    found: dict[str, Any] = {"faults": {}, "limits": {}, "cost": {}}
    for mib, faults in (_QUICK if quick else _FAULTS).items():
        found["limits"][str(mib)] = limits(mib << 20, 1 if quick else 5)
        ways = found["faults"].setdefault(str(mib), {})
        for way in _QUICK_WAYS if quick else WAYS:
            print(f"rollback: {mib} MiB, {WAYS[way].name}, {faults} faults", flush=True)
            ways[way] = measure(mib, way, faults)
    for name in list(MODELS)[:1] if quick else MODELS:
        print(f"rollback: the cost per step, {name}", flush=True)
        found["cost"][name] = step_cost(name, 0.0 if quick else 60.0)
    name = next(iter(MODELS))
    found["mirrors"] = {name: step_cost(name, 0.0 if quick else 60.0, mirrors=True)}
    return found
