"""The logs of a run: folders, strict reading, and following them while they are written."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from events.synthetic_run import SyntheticRun
from outlast.errors import EventLogError
from outlast.events import run_folders
from outlast.events.emitter import Emitter, JsonlSink
from outlast.events.event import Event, Note, event_to_dict
from outlast.events.report import build, load
from outlast.events.run_folders import OWN, Follower, choose_run, new_run, runs_in
from outlast.events.types import Fault, Seen, StepsDone

GOOD = json.dumps(event_to_dict(Seen(iteration=0, member=0, rank=0, host="a", pid=1, time=2.0)))


def test_what_sinks_write_is_read_back(tmp_path: Path) -> None:
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=1.0)
    run.complete(at=2.0)
    for pid in (1000, 1001):
        sink = JsonlSink(tmp_path / f"{pid}.jsonl")
        for event in run.events:
            if event.pid == pid:
                sink.write(event)
        sink.close()
    (tmp_path / "notes.txt").write_text("no log")
    assert load(tmp_path) == sorted(run.events, key=lambda event: event.pid)


def test_a_torn_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl").write_text(GOOD + "\n" + GOOD[:30])
    report = build(load(tmp_path))
    assert report.torn_logs == ("killed.jsonl",)
    assert report.notes == {}
    assert report.events == 1


def test_a_last_line_without_its_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl").write_text(GOOD + "\n" + GOOD)
    report = build(load(tmp_path))
    assert report.torn_logs == ()
    assert report.events == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (GOOD[:30], "not JSON"),
        ("", "not JSON"),
        ("[1]", "not a JSON object"),
        ('"\udcff"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"kind": "no such"}', "unknown kind"),
        ("{}", "unknown kind"),
        ('{"kind": "seen", "time": "noon"}', "'seen': Expected `float`, got `str` - at `\\$.time`"),
        ('{"kind": "seen", "rank": true}', "'seen': Expected `int`, got `bool` - at `\\$.rank`"),
        ('{"kind": "seen", "host": null}', "'seen': Expected `str`, got `null` - at `\\$.host`"),
        (
            '{"kind": "entered", "active": 1}',
            "'entered': Expected `bool`, got `int` - at `\\$.active`",
        ),
        ('{"kind": "note", "data": []}', "'note': Expected `object`, got `array` - at `\\$.data`"),
        ('{"kind": "seen", "time": NaN}', "'seen': Expected `float`, got `str` - at `\\$.time`"),
        ('{"kind": "seen", "time": 1e999}', "'seen': Expected `float`, got `str` - at `\\$.time`"),
    ],
)
def test_a_corrupt_line_is_an_error_with_its_place(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n{GOOD}\n".encode(errors="surrogateescape"))
    with pytest.raises(EventLogError, match=what) as caught:
        load(tmp_path)
    assert f"{path}, line 2" in str(caught.value)


def test_fields_of_a_newer_version_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "seen", "colour": "blue"}\n')
    assert load(tmp_path) == [Seen()]


def test_characters_of_undecodable_file_names_are_replaced(tmp_path: Path) -> None:
    fault = Fault(host="a", cause="no file 'x\udcff.pt'", traceback="\ud800", time=2.0)
    note = Note(name="n", data={"\udcff": ["\udcff", float("nan")]}, time=3.0)
    sink = JsonlSink(tmp_path / "a.jsonl")
    sink.write(fault)
    sink.write(note)
    sink.close()
    read = load(tmp_path)
    assert read[0] == dataclasses.replace(fault, cause="no file 'x?.pt'", traceback="?")
    assert read[1] == dataclasses.replace(note, data={"?": ["?", "NaN"]})


def test_a_line_that_did_not_fit_on_the_disk_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "a.jsonl")
    event = Seen(host="a", pid=1, time=2.0)
    sink.write(event)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, content: write(fd, content[:10]))
        with pytest.raises(OSError, match="No space left"):
            sink.write(event)
    sink.write(event)
    sink.close()
    assert load(tmp_path) == [event, event]


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    assert load(tmp_path) == []


def test_a_directory_without_logs(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="no event logs"):
        load(tmp_path)
    with pytest.raises(EventLogError, match="is not a folder: it does not exist"):
        load(tmp_path / "missing")


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


def emitter(path: Path, host: str = "here") -> Emitter:
    return Emitter(JsonlSink(path), host=host)


def steps(events: list[Event]) -> list[int]:
    return [event.last for event in events if isinstance(event, StepsDone)]


def line(step: int, host: str = "here") -> bytes:
    return b'{"kind":"steps_done","host":"%s","time":%d.5,"last":%d}\n' % (
        host.encode(),
        step,
        step,
    )


def test_each_poll_reads_only_what_is_new(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.poll() == []
    one, other = emitter(tmp_path / "rank0-1.jsonl"), emitter(tmp_path / "rank1-2.jsonl")
    one.emit(StepsDone(last=1))
    assert steps(follower.poll()) == [1]
    other.emit(StepsDone(last=2))
    one.emit(StepsDone(last=3))
    assert steps(follower.poll()) == [2, 3]  # by time, across the logs
    assert follower.poll() == []
    for each in (one, other):
        each.sink.close()


def test_an_unchanged_log_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(line(1))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [1]
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("the log was opened"))
    assert follower.poll() == []


@pytest.mark.parametrize("cut", [1, 20, len(line(7)) - 1])
def test_a_partial_last_line_is_read_once_it_is_complete(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(6) + line(7)[:cut])
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [6]
    assert follower.poll() == []
    with open(path, "ab") as file:
        file.write(line(7)[cut:])
    assert steps(follower.poll()) == [7]
    assert follower.damaged_lines == 0


def test_a_log_that_ends_in_a_torn_line_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line(1) + b'{"kind":"st')
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [1]
    (tmp_path / "b.jsonl").write_bytes(line(2))  # the process that replaced the killed one
    assert steps(follower.poll()) == [2]
    assert follower.poll() == []
    assert follower.damaged_lines == 0


def test_a_rotated_log_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(1))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [1]
    with open(path, "ab") as writer:
        writer.write(line(2))
        writer.flush()
        path.rename(tmp_path / "a.jsonl.1")
        path.write_bytes(line(4))
        writer.write(line(3))  # its writer still has it open
    assert steps(follower.poll()) == [2, 3, 4]
    assert follower.poll() == []


def test_a_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(1) + line(2))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [1, 2]
    os.truncate(path, 0)
    with open(path, "ab") as file:
        file.write(line(3))
    assert steps(follower.poll()) == [3]


def test_a_removed_log_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(1))
    follower = Follower(tmp_path)
    follower.poll()
    path.unlink()
    assert follower.poll() == []
    path.write_bytes(line(2))
    assert steps(follower.poll()) == [2]


def test_a_line_that_is_not_an_event_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line(1) + b"not JSON\n" + line(2))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == [1, 2]
    assert follower.damaged_lines == 1
    assert "a.jsonl, line 2: not JSON" in follower.damaged[0]


def test_logs_of_other_hosts_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line(1, "here"))
    (tmp_path / "b.jsonl").write_bytes(line(2, "there"))
    follower = Follower(tmp_path, host="here")
    assert steps(follower.poll()) == [1]
    for name, host, step in (("a", "here", 3), ("b", "there", 4)):
        with open(tmp_path / f"{name}.jsonl", "ab") as file:
            file.write(line(step, host))
    assert steps(follower.poll()) == [3]


def test_thousands_of_events_arrive_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "_READ_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(line, range(5000))))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == list(range(5000))
    assert follower.poll() == []


def test_a_line_longer_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "_READ_BYTES", 10)
    (tmp_path / "a.jsonl").write_bytes(line(1) + line(2) + line(3)[:-1])
    assert steps(Follower(tmp_path).poll()) == [1, 2]


def test_other_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(line(1))
    (tmp_path / "folder.jsonl").mkdir()
    assert Follower(tmp_path).poll() == []


def test_an_event_that_nobody_reads_is_not_made() -> None:
    def make(**fields: object) -> Seen:
        raise AssertionError("it is made")

    kind: Any = make
    emitter = Emitter()
    with emitter.span(kind):
        pass
    assert emitter.drops
