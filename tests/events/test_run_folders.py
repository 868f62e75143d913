"""Several runs in one directory: one folder each; the newest is the default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.errors import EventLogError
from outlast.events import JsonlSink, Seen
from outlast.events.report import load
from outlast.events.run_folders import OWN, choose_run, new_run, runs_in


def written(folder: Path, reason: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    sink = JsonlSink(folder / "rank0-1.jsonl")
    sink.write(Seen(iteration=0, member=0, rank=0, host="a", pid=1, time=2.0, reason=reason))
    sink.close()
    return folder


def reasons(folder: Path, run: str | None = None) -> list[str]:
    return [event.reason for event in load(folder, run) if isinstance(event, Seen)]


def test_each_run_has_its_own_folder_even_with_a_repeated_id(tmp_path: Path) -> None:
    folders = [written(new_run(tmp_path / "events", "nightly"), str(i)) for i in range(5)]
    assert len(set(folders)) == 5
    runs = runs_in(tmp_path / "events")
    assert [run.folder for run in runs] == folders
    assert {run.run_id for run in runs} == {"nightly"}
    assert reasons(tmp_path / "events") == ["4"]
    assert reasons(tmp_path / "events", "nightly") == ["4"]
    assert reasons(tmp_path / "events", runs[1].name) == ["1"]
    assert reasons(folders[2]) == ["2"]  # the folder of one run is an ordinary directory


def test_a_run_id_may_contain_a_slash(tmp_path: Path) -> None:
    folder = written(new_run(tmp_path, "team/nightly"), "1")
    assert folder.parent == tmp_path
    assert reasons(tmp_path) == ["1"]


def test_the_names_tell_the_order_not_the_times_of_a_copy(tmp_path: Path) -> None:
    for day, run_id in ((2, "b"), (3, "a-b"), (1, "20260101-000000.000-c")):
        written(tmp_path / f"2026010{day}-120000.000-{run_id}", str(day))
    runs = runs_in(tmp_path)
    assert [run.run_id for run in runs] == ["20260101-000000.000-c", "b", "a-b"]
    assert [run.at.day for run in runs] == [1, 2, 3]
    assert choose_run(runs, "b").at.day == 2


@pytest.mark.parametrize(("own_is_newer", "newest"), [(True, "own"), (False, "other")])
def test_logs_in_the_directory_itself_are_a_run_too(
    tmp_path: Path, own_is_newer: bool, newest: str
) -> None:
    written(tmp_path, "own")
    written(tmp_path / "20260101-120000.000-x", "other")
    moment = 1_800_000_000 if own_is_newer else 1_700_000_000  # in 2027, in 2023
    os.utime(tmp_path / "rank0-1.jsonl", (moment, moment))
    assert reasons(tmp_path) == [newest]
    assert reasons(tmp_path, OWN) == ["own"]
    assert reasons(tmp_path, "x") == ["other"]


def test_other_folders_are_skipped(tmp_path: Path) -> None:
    written(tmp_path / "other", "no name of a run")
    written(tmp_path / "20261399-120000.000-x", "no date")
    (tmp_path / "20260101-120000.000-empty").mkdir()
    (tmp_path / "20260101-120000.000-file").write_text("")
    with pytest.raises(EventLogError, match="no event logs"):
        runs_in(tmp_path)
    with pytest.raises(EventLogError, match="is not a folder: it does not exist"):
        load(tmp_path / "nowhere")


def test_the_parent_of_an_events_directory_is_told_where_the_logs_are(tmp_path: Path) -> None:
    for name in ("first", "second", "third", "fourth"):
        written(tmp_path / name / "20260101-120000.000-x", "")
    (tmp_path / "without").mkdir()
    with pytest.raises(EventLogError, match=r"folders in it that have: .*/first, .* and 1 more$"):
        runs_in(tmp_path)


def test_an_unknown_run_is_an_error_that_lists_the_runs(tmp_path: Path) -> None:
    written(tmp_path / "20260101-120000.000-x", "")
    with pytest.raises(EventLogError, match=r"no run 'y'; there are: 20260101-120000\.000-x"):
        load(tmp_path, "y")
