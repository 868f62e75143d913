"""At the end of a job, the launcher records which faults of its plan have fired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.runs import Run
from outlast.events.report import build, load
from outlast.events.report.sentences import describe
from outlast.events.types import PlannedFault

PLAN = {
    "faults": [
        {"rank": 0, "kind": "exception", "step": 1},
        {"rank": 1, "kind": "sigkill", "iteration": 2, "step": 100},
    ]
}

SCRIPT = """
import os
from outlast.chaos import step
from outlast.errors import ChaosError
try:
    step(1)
except ChaosError:
    print("rank", os.environ["RANK"], "has fired", flush=True)
"""


@pytest.mark.slow
def test_faults_that_never_came_due_are_named(tmp_path: Path) -> None:
    plan, events = tmp_path / "plan.json", tmp_path / "events"
    plan.write_text(json.dumps(PLAN))
    with Run(tmp_path, SCRIPT, f"--chaos={plan}", f"--events-dir={events}") as run:
        assert run.wait() == 0
    assert "rank 0 has fired" in run.out
    logged = load(events)
    fired, missed = sorted(
        (event for event in logged if isinstance(event, PlannedFault)),
        key=lambda event: event.key,
    )
    assert (fired.key, fired.name, fired.fired, fired.rank) == ("planned-0", "exception", True, 0)
    assert fired.pid > 0
    assert (missed.name, missed.fired, missed.due) == ("sigkill", False, "iteration 2, step 100")
    assert describe("injected", build(logged)) == [
        "Planned faults: 1 of 2 fired.",
        "Never due, so not fired: sigkill on rank 1 (iteration 2, step 100).",
    ]
