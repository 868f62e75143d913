"""`outlast report`: as text, as JSON, and of a folder without logs."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from outlast.events import Assigned, Entered, JsonlSink
from outlast.launch.cli import app


def written(folder: Path) -> Path:
    sink = JsonlSink(folder / "rank0-1.jsonl")
    for event in (Assigned(world_size=1, active_world_size=1), Entered()):
        sink.write(type(event)(**{**vars(event), "iteration": 0, "member": 0, "rank": 0}))
    sink.close()
    return folder


def test_a_run_without_faults_as_text_and_as_json(tmp_path: Path) -> None:
    folder = written(tmp_path)
    text = CliRunner().invoke(app, ["report", str(folder)])
    assert text.exit_code == 0, text.output
    assert "rank" in text.output
    report = CliRunner().invoke(app, ["report", "--json", str(folder)])
    assert report.exit_code == 0, report.output
    assert json.loads(report.output)["restarts"] == []


def test_a_folder_without_logs_is_an_error_that_names_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert tmp_path.name in result.output
