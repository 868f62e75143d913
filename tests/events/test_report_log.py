"""Logs are read strictly: a torn last line is skipped, any other is an error with its place."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from events.synthetic_run import SyntheticRun
from outlast.errors import EventLogError
from outlast.events import Fault, JsonlSink, Note, Seen, event_to_dict
from outlast.events.report import build, load

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
        ('{"kind": "entered", "active": 1}', "'entered': Expected `bool`, got `int` - at `\\$.active`"),
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
