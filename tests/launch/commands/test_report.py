"""`outlast report`: as text, as JSON, and of a folder without logs."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from outlast.events.emitter import JsonlSink
from outlast.events.types import Assigned, Entered
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


def test_a_folder_that_is_not_there_is_an_error_in_the_style_of_all_commands(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "file").touch()
    commands = (["report"], ["checkpoint", "ls"], ["checkpoint", "verify"])
    for command in commands:
        for path, why in ((missing, "it does not exist; "), (tmp_path / "file", "")):
            result = CliRunner().invoke(app, [*command, str(path)])
            assert (result.exit_code, result.stdout) == (1, ""), result.output
            assert result.stderr.startswith(
                f"outlast: error: {path} is not a folder: {why}give the "
            ), result.stderr
            assert result.stderr.count("\n") == 1


def two_runs(folder: Path) -> tuple[str, str]:
    names = ("20260101-120000.000-first", "20260102-120000.000-second")
    for name in names:
        written(folder / name)
    return names


def test_the_newest_of_several_runs_and_how_to_see_the_others(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    newest = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert newest.exit_code == 0, newest.output
    *_, says, other = newest.output.splitlines()
    assert says == f"Run {second}; 1 other in {tmp_path}, shown by --run NAME or --all:"
    assert other == f"  {first}"
    assert newest.output.count("1 rank · ") == 1
    for name in (first, "first"):
        one = CliRunner().invoke(app, ["report", str(tmp_path), "--run", name])
        assert one.exit_code == 0, one.output
        assert f"Run {first}; 1 other" in one.output
        assert f"  {second}" in one.output
    whole = CliRunner().invoke(app, ["report", str(tmp_path), "--all"])
    assert whole.exit_code == 0, whole.output
    assert whole.output.index(f"Run {first}:") < whole.output.index(f"Run {second}:")
    assert whole.output.count("1 rank · ") == 2


def test_several_runs_as_json(tmp_path: Path) -> None:
    names = two_runs(tmp_path)
    one = CliRunner().invoke(app, ["report", "--json", str(tmp_path)])
    assert json.loads(one.stdout)["calls"] == 1
    assert names[0] in one.stderr
    whole = CliRunner().invoke(app, ["report", "--json", "--all", str(tmp_path)])
    found = json.loads(whole.stdout)
    assert [each["run"] for each in found] == list(names)
    assert [each["report"]["calls"] for each in found] == [1, 1]


def test_many_other_runs_are_counted(tmp_path: Path) -> None:
    for day in range(1, 9):
        written(tmp_path / f"2026010{day}-120000.000-x\x1b")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    *_, says, a, b, c, d, e, rest = result.output.splitlines()
    assert "; 7 others in " in says
    assert [line[9] for line in (a, b, c, d, e)] == list("76543")
    assert rest == "  ... and 2 older"
    assert "\x1b" not in result.output


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    names = two_runs(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--run", "third"])
    assert result.exit_code == 1
    assert result.stderr == f"outlast: error: no run 'third'; there are: {', '.join(names)}\n"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--run", "first", "--all"])
    assert result.exit_code == 2


def test_logs_without_a_run_beside_runs(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path)
    written(tmp_path)  # as a job under torchrun does, and later than those
    newest = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert f"The logs in {tmp_path} itself; 2 others in {tmp_path}, " in newest.output
    assert newest.output.endswith(f"  {second}\n  {first}\n")
    one = CliRunner().invoke(app, ["report", str(tmp_path), "--run", "first"])
    assert one.output.endswith(f"  . (the logs in it)\n  {second}\n")
