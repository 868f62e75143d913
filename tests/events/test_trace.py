"""The trace of `outlast report --trace`: what Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from events.pages import large_run
from events.synthetic_run import ABORT, FINALIZE, RESTART, SEEN, SyntheticRun
from events.test_goodput import save
from events.test_report_build import run_with_an_exception
from events.test_report_render import a_run, log
from outlast.events import Event
from outlast.events.report import build, to_trace
from outlast.launch.cli import app


def traced(events: list[Event]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(to_trace(build(events)))["traceEvents"]
    return found


def of_lane(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    (lane,) = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == name]
    return [e for e in events if (e["pid"], e["tid"]) == (lane["pid"], lane["tid"])]


def test_the_phases_of_a_recovery_are_within_the_restart_of_their_rank() -> None:
    own = of_lane(traced(run_with_an_exception().events), "rank 0")
    states = [(e["name"], e["ts"], e["dur"]) for e in own if e.get("cat") == "state"]
    seen = 10.0 + SEEN
    assert states == [
        ("training", 0, round(seen * 1e6)),
        ("restarting", round(seen * 1e6), round((10.0 + RESTART) * 1e6) - round(seen * 1e6)),
        ("training", round((10.0 + RESTART) * 1e6), 10_000_000),
    ]
    phases = {e["name"]: e for e in own if e.get("cat") == "phase"}
    assert phases["abort"]["ts"] == round(seen * 1e6)
    assert abs(phases["abort"]["dur"] - ABORT * 1e6) <= 1
    assert abs(phases["finalize"]["dur"] - FINALIZE * 1e6) <= 1
    assert {"leave", "health"} <= phases.keys()


def test_slices_of_a_lane_lie_within_each_other_or_apart() -> None:
    events = traced(large_run(30).events)
    for process, thread in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        ends: list[int] = []
        own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, thread)]
        for each in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= each["ts"]:
                ends.pop()
            assert not ends or each["ts"] + each["dur"] <= ends[-1], each
            ends.append(each["ts"] + each["dur"])


def test_saves_that_overlap_are_pairs_of_a_begin_and_an_end() -> None:
    run = SyntheticRun()
    run.begin(at=0.0)
    save(run, 10, began=5.0)
    save(run, 20, began=5.25)
    run.complete(at=10.0)
    own = [e for e in of_lane(traced(run.events), "checkpoints") if e["ph"] != "M"]
    assert [(e["ph"], e["id"], e["ts"]) for e in own] == [
        ("b", "1-0", 5_000_000),
        ("e", "1-0", 5_500_000),
        ("b", "1-1", 5_250_000),
        ("e", "1-1", 5_750_000),
    ]


def test_hosts_are_processes_and_marks_are_instants(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    result = CliRunner().invoke(app, ["report", str(log(a_run(), tmp_path)), "--trace", str(file)])
    assert result.output == f"wrote {file}\n"
    trace = json.loads(file.read_text())
    assert trace["otherData"] == {"run": "nightly", "command": "train.py --name 'a <b>'"}
    events = trace["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a"]
    (fault,) = [e for e in of_lane(events, "rank 1") if e["ph"] == "i"]
    assert (fault["name"], fault["s"]) == ("fault", "t")
    assert fault["args"]["text"] == "killed by SIGKILL: main process ended"
    for each in events:
        assert each["ph"] in "MXibe"
        assert each["ph"] == "M" or isinstance(each["ts"], int)
