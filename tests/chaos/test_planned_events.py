"""The events about a plan: which of its faults have fired."""

from __future__ import annotations

import json
from pathlib import Path

from outlast.chaos.fired_faults import MarkerDirectory, planned_events

PLAN = {
    "faults": [
        {"rank": 0, "kind": "exception", "step": 1},
        {"rank": 1, "kind": "hang", "iteration": 2, "after_seconds": 3, "phase": "restore"},
        {"rank": 2, "kind": "sigkill"},
    ]
}


def record(key: str, kind: str) -> dict[str, object]:
    place = {"rank": 0, "iteration": 0, "step": 1, "host": "a", "pid": 7, "time": 5.0}
    return {"key": key, "kind": kind, **place}


def test_each_planned_fault_has_one_event(tmp_path: Path) -> None:
    plan, state = tmp_path / "plan.json", tmp_path / "state"
    plan.write_text(json.dumps(PLAN))
    markers = MarkerDirectory(state)
    markers.claim("planned-0", record("planned-0", "exception"))
    markers.claim("random-0", record("random-0", "sigterm"))
    markers.claim("draw-0-0-1", {})  # a draw is no fault
    events = {event.key: event for event in planned_events(plan, state)}
    assert {key: event.fired for key, event in events.items()} == {
        "planned-0": True,
        "planned-1": False,
        "planned-2": False,
        "random-0": True,
    }
    fired = events["planned-0"]
    assert (fired.name, fired.host, fired.pid, fired.time) == ("exception", "a", 7, 5.0)
    missed = events["planned-1"]
    assert (missed.name, missed.rank) == ("hang", 1)
    assert missed.due == "iteration 2, after 3 s, phase restore"
    assert events["planned-2"].due == ""
