"""What `outlast report` shows: text, JSON, and the trace for Perfetto."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from events.pages import Page, large_run
from events.synthetic_run import ABORT, FINALIZE, RESTART, SEEN, SyntheticRun
from events.test_goodput import save
from events.test_report_build import run_with_an_exception
from outlast.events.emitter import JsonlSink
from outlast.events.event import Event, Note
from outlast.events.report import build, load, render_html, render_report, to_json, to_trace
from outlast.events.report.model import SCHEMA
from outlast.events.report.sentences import one_line, plural, share
from outlast.events.types import BarrierPassed, LauncherStarted, WorkerExited
from outlast.launch.cli import app
from outlast.system.units import duration_text


def a_run() -> SyntheticRun:
    run = SyntheticRun()
    run.begin(at=1.0)
    trace = 'Traceback:\n  File "/home/me/train.py", line 41, in step\n    raise ValueError\n'
    message = "ValueError: [bold]no markup[/bold] \x1b[31m" + "a long message " * 12
    run.fault(2, at=11.0, cause=message, traceback=trace)
    run.restart(at=11.0)
    run.fault(0, at=15.0, cause="connection closed by peer", consequence=True)
    run.death(1, at=15.25)
    run.restart(at=15.25, lost=[1], joiners=["a"])
    run.restart(at=20.0, joiners=["a"])
    run.write(0, Note(name="checkpoint.saved"), 21.0)
    run.complete(at=31.5)
    run.events.append(WorkerExited(host="a", pid=1, time=15.3, worker_pid=1001, exit_code=-9))
    command = "train.py --name 'a <b>'"
    started = LauncherStarted(host="a", pid=1, time=1.0, run_id="nightly", command=command)
    run.events.append(started)
    return run


def log(run: SyntheticRun, folder: Path) -> Path:
    sink = JsonlSink(folder / "all.jsonl")
    for event in run.events:
        sink.write(event)
    sink.close()
    return folder


def printed(folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_report(build(load(folder)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_story_of_a_run(tmp_path: Path) -> None:
    text = printed(log(a_run(), tmp_path))
    assert "5 ranks · 1 host · 3 restarts · 1 lost, 1 replaced" in text
    whole = " ".join(text.split())
    assert "Rank 2 (pid 1002, host a) raised an exception: ValueError: [bold]no markup" in whole
    assert ("a long message " * 12).strip() in whole, "wrapped, not cut"
    assert "…" not in text
    assert "(train.py, line 41, in step)" in " ".join(text.split())
    assert "Rank 1 (pid 1001, host a) was killed by SIGKILL." in text
    assert "Probably as a consequence, rank 0 failed: connection closed by peer." in text
    assert "Lost: rank 1 on a (terminated)." in text
    assert "Joined: rank 3 on a." in text
    assert "new ranks joined" in text
    assert "500.0 ms after the fault" in text
    assert "5 ranks completed the function." in text
    assert "checkpoint.saved 1" in text
    assert "\x1b" not in text


def test_the_name_of_a_host_is_no_markup(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["[/a]"] * 2)
    run.begin(at=1.0)
    run.complete(at=2.0)
    assert "Time on [/a]" in printed(log(run, tmp_path))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_rows_are_not_wrapped(tmp_path: Path, width: int) -> None:
    lines = printed(log(a_run(), tmp_path), width).splitlines()
    assert all(len(line) <= width for line in lines)
    for number in "123":  # one row in each table, and one heading
        starts = [line for line in lines if line.split()[:1] in ([number], [number + "."])]
        assert len(starts) == 3, lines


def test_nothing_is_cut_at_80(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a"] * 40)
    run.begin(at=50_000.0)
    name = "a_package.a_module.AnExceptionWithANameThatIsLongerThanItsColumn"
    run.fault(39, at=100_000.0, cause=f"{name}: {'no' * 100} {'words' * 300}")
    for member in range(20, 39):
        run.write(member, BarrierPassed(name="replacements", seconds=0.25), 100_000.375)
    run.restart(at=100_000.0, lost=range(20), joiners=["a"] * 20)
    run.complete(at=200_000.0)
    text = printed(log(run, tmp_path), 80)
    assert "waiting for replacements 250.0 ms" in " ".join(text.split())
    assert "…" not in text
    assert "..." not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert f"{name}: {'no' * 100} {'words' * 300}".replace(" ", "") in "".join(text.split())


def test_every_phase_has_its_column_at_100(tmp_path: Path) -> None:
    text = printed(log(a_run(), tmp_path))
    (row,) = [line for line in text.splitlines() if line.split()[:2] == ["#", "detect"]]
    assert "start" in row
    assert "total" in row
    assert "…" not in row


def test_a_run_without_faults(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a"])
    run.begin(at=0.0)
    run.complete(at=10.0)
    text = printed(log(run, tmp_path))
    assert "1 rank · 1 host · 0 restarts" in text
    assert "goodput 100 %" in text


def test_a_run_that_never_ended(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    run.death(0, at=1.0)
    text = printed(log(run, tmp_path))
    assert "No rank entered the function again." in text
    assert "No rank is known to have completed" in text


def test_a_large_job_makes_short_sentences(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a"] * 40)
    run.begin(at=0.0)
    for rank in range(1, 40):
        run.fault(rank, at=1.0, cause="x" * 500, consequence=True)
    run.death(0, at=1.0)
    run.restart(at=1.0, lost=range(20), joiners=["a"] * 20)
    text = " ".join(printed(log(run, tmp_path)).split())
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 31 more failed: xxx" in text
    assert "rank 8 on a and 11 more (EXCEPTION)." in text
    assert max(len(sentence) for sentence in text.split(". ")) < 900


def test_a_consequence_without_its_fault_is_reported_as_such(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    message = "RuntimeError: [/some/where/gloo/pair.cc:553] Connection closed by peer"
    run.fault(0, at=1.0, cause=message, consequence=True)
    run.restart(at=1.0)
    text = " ".join(printed(log(run, tmp_path)).split())
    assert "Rank 0 (pid 1000, host a) raised an exception: RuntimeError: Connection closed" in text
    assert "the consequence of a fault that is not in the logs" in text


def test_json_says_the_same(tmp_path: Path) -> None:
    report = json.loads(to_json(build(load(log(a_run(), tmp_path)))))
    assert report["restarts"][0]["cause"]["rank"] == 2
    assert report["restarts"][1]["phases"]["total"] == 0.5
    assert report["replaced"] == 1
    told = "3 restarts: 1 x ValueError (rank 2), 1 x killed by SIGKILL (rank 1), "
    assert report["restart_causes"] == told + "1 x new ranks joined"
    assert (report["schema"], report["run_id"]) == (SCHEMA, "nightly")
    assert "ranks" not in report["restarts"][0], "they are in the trace"


def test_a_host_that_joins_at_the_end_of_a_step_is_a_move(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "b", "b"])
    run.begin(at=0.0)
    run.death(2, at=1.0)
    run.restart(at=1.0, lost=[2])
    run.restart(at=2.0, joiners=["c"], reason="moved")
    run.complete(at=9.0)
    folder = log(run, tmp_path)
    text = " ".join(printed(folder).split())
    assert "moved: new ranks joined" in text
    assert "No fault: ranks joined at the end of a step" in text
    assert "1 lost, 1 replaced" in text
    report = json.loads(to_json(build(load(folder))))
    assert report["restart_causes"] == "1 move and 1 restart: 1 x died (rank 2)"


def test_the_end_tells_the_restarts_by_cause(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    for number in range(3):
        run.fault(number % 2, at=number + 1.0, cause="KeyError: 'lr'", where="bug.py:16 in step")
        run.restart(at=number + 1.0)
    told = "3 restarts: 3 x KeyError at bug.py:16 (ranks 0, 1)."
    folder = log(run, tmp_path)
    assert told in " ".join(printed(folder).split())
    assert told in Page(render_html(build(load(folder)), title="a run")).text


def test_words() -> None:
    assert [duration_text(s) for s in (0.0005, 0.0123, 4.56, 200.0)] == [
        "500 µs",
        "12.3 ms",
        "4.56 s",
        "3 min 20 s",
    ]
    assert [plural(n, "rank") for n in (1, 2)] == ["1 rank", "2 ranks"]
    assert [plural(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [share(part) for part in (0.5, 0.999999, 1.0)] == ["50.00 %", "99.99 %", "100 %"]
    assert one_line("\n  a\tb\x07 \nc") == "a�b�"


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
