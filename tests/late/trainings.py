"""Faults of trainings on the device, and what must hold after them."""

from __future__ import annotations

import math
from typing import Any

from elastic.live_trainings import Run, fault

MEMORY = ("live", "replica")


def check(faulty: Run, reference: Run, *steps: int, sources: tuple[str, ...] = MEMORY) -> None:
    """All ranks continue from one of these steps; every bit is that of the run without faults."""
    found = faulty.restored().values()
    assert {source for _, source in found} <= set(sources), faulty.errors
    assert len({step for step, _ in found}) == 1, faulty.errors
    assert {step for step, _ in found} <= set(steps), faulty.errors
    wanted = reference.losses()  # not all are told: a rank may have received the state after it
    assert all(math.isfinite(float.fromhex(each)) for told in wanted.values() for each in told)
    assert faulty.losses() == {key: wanted[key] for key in faulty.losses()}
    assert faulty.ended() == reference.ended()


def ahead(at: str, do: str, nprocs: int = 2, *, when: str = "computed 5") -> list[dict[str, Any]]:
    """A fault of rank 1 when the hosts of the others are as far ahead of step 5 as they get. Their
    streams wait for what rank 1 computes, such as its gradients, which never comes.
    """
    others = [other for other in range(nprocs) if other != 1]
    marks = [fault(other, when, f"mark ahead {other}") for other in others]
    waits = [f"await ahead {other}" for other in others]
    return [*marks, fault(1, at, ", ".join([*waits, "pause", do]))]
