"""The events of a job without `--events-dir`: beside the checkpoints, bounded, and found there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outlast.events.emitter import Emitter, JsonlSink
from outlast.events.event import Event
from outlast.events.report import build, load
from outlast.events.run_folders import Follower, choose_run, new_run, runs_in
from outlast.events.spool import BESIDE, Spool, keep_events_beside
from outlast.events.types import LauncherEnded, StepsDone
from outlast.launch.cli import app

RUN = "20261121-212345.123-nightly"
HOLD = """
import sys
from outlast.events.emitter import Emitter, JsonlSink
from outlast.events.types import LauncherStarted
Emitter(JsonlSink(sys.argv[1], locked=True)).emit(LauncherStarted(run_id="held"))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    Spool.create(folder, RUN, ranks=1)
    return folder


def steps(events: list[Event]) -> list[int]:
    return [event.first for event in events if isinstance(event, StepsDone)]


def emit(sink: JsonlSink, *numbers: int) -> None:
    emitter = Emitter(sink, host="h")
    for number in numbers:
        emitter.emit(StepsDone(first=number, last=number))


def test_logs_move_beside_the_checkpoints(spool: Path, tmp_path: Path) -> None:
    checkpoints, follower = tmp_path / "checkpoints", Follower(spool)
    alive, dead = JsonlSink(spool / "rank0-17.jsonl"), JsonlSink(spool / "rank1-18.jsonl")
    emit(alive, 1, 2)
    emit(dead, 3)
    dead.close()
    followed = follower.poll()
    keep_events_beside(str(spool), str(checkpoints), warn=True)
    assert sorted(steps(load(checkpoints))) == [1, 2, 3], "of a process that is killed now"
    emit(alive, 4)
    # The second checkpointer of a job changes nothing.
    keep_events_beside(str(spool), str(tmp_path / "others"), warn=True)
    emit(alive, 5)
    alive.close()
    later = JsonlSink(spool / "rank1-19.jsonl")
    emit(later, 6)
    later.close()
    assert sorted(steps(load(checkpoints))) == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "others").exists()
    followed += follower.poll()
    assert sorted(steps(followed)) == [1, 2, 3, 4, 5, 6], "each of them once"
    assert [path.name for path in checkpoints.iterdir()] == [BESIDE]
    assert [path.name for path in (checkpoints / BESIDE).iterdir()] == [RUN]


def test_the_oldest_and_the_newest_events_stay(spool: Path, tmp_path: Path) -> None:
    (spool / ".run").write_text(f"1000 {RUN}")
    checkpoints, sink = tmp_path / "checkpoints", JsonlSink(spool / "rank0-17.jsonl")
    emit(sink, 0)
    keep_events_beside(str(spool), str(checkpoints), warn=True)
    emit(sink, *range(1, 100))
    sink.close()
    events = load(checkpoints)
    found = steps(events)
    assert found[0] == 0
    assert found[-1] == 99
    assert found[1:] == list(range(found[1], 100))
    files = list((checkpoints / BESIDE / RUN).iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size < 1500 for file in files)
    (first,) = (file for file in files if file.name.endswith(".0.jsonl"))
    assert build(events).dropped_bytes >= first.stat().st_size * (found[1] - 1) > 3000
    shown = CliRunner().invoke(app, ["report", str(checkpoints)], env={"COLUMNS": "200"}).output
    assert "of events are missing in their middle" in shown
    assert f"Run {RUN}, in {checkpoints}." in shown


def test_older_runs_go(spool: Path, tmp_path: Path) -> None:
    base = tmp_path / "checkpoints" / BESIDE
    for number in range(12):
        (base / f"20250101-0000{number:02d}.000-old").mkdir(parents=True)
    keep_events_beside(str(spool), str(base.parent), warn=True)
    assert sorted(path.name[13:15] for path in base.iterdir()) == [
        *(f"{number:02d}" for number in range(5, 12)),
        RUN[13:15],
    ]


def test_where_the_events_are_without_a_folder_of_checkpoints(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    occupied = tmp_path / "checkpoints"
    occupied.mkdir()
    (occupied / BESIDE).touch()
    with caplog.at_level(logging.WARNING):
        keep_events_beside(str(spool), str(occupied), warn=True)
    assert "the events of this run are not kept" in caplog.text
    assert "give --events-dir" in caplog.text
    keep_events_beside(str(spool), "memory://bucket/checkpoints", warn=True)
    assert Spool(spool, 0).target == tmp_path / "tmp" / f"outlast-{os.getuid()}" / "events" / RUN


def test_the_run_that_is_alive_is_reported(tmp_path: Path) -> None:
    older, newer = new_run(tmp_path, "a"), new_run(tmp_path, "b")
    sink = JsonlSink(newer / "agent-1.jsonl", locked=True)
    Emitter(sink).emit(LauncherEnded(exit_code=3, last_lines="first\n  second"))
    sink.close()
    hold = [sys.executable, "-c", HOLD, str(older / "agent-2.jsonl")]
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        assert choose_run(runs_in(tmp_path), None).folder == older
        assert choose_run(runs_in(tmp_path), "b").folder == newer
        shown = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "200"}).output
        assert f"Run {older.name}, which is running; 1 other in {tmp_path}" in shown
        process.stdin.close()
    assert choose_run(runs_in(tmp_path), None).folder == newer
    shown = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "200"}).output
    lines = [line.rstrip() for line in shown.splitlines()]
    assert "\n".join(lines).count("Last lines of the launcher:\n  first\n    second") == 1
