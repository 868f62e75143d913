"""The follower of a running job's logs: partial lines, rotation, damage, many events."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.events import Emitter, Event, JsonlSink, StepsDone, follow
from outlast.events.follow import Follower


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
    monkeypatch.setattr(follow, "_READ_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(line, range(5000))))
    follower = Follower(tmp_path)
    assert steps(follower.poll()) == list(range(5000))
    assert follower.poll() == []


def test_a_line_longer_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_READ_BYTES", 10)
    (tmp_path / "a.jsonl").write_bytes(line(1) + line(2) + line(3)[:-1])
    assert steps(Follower(tmp_path).poll()) == [1, 2]


def test_other_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(line(1))
    (tmp_path / "folder.jsonl").mkdir()
    assert Follower(tmp_path).poll() == []
