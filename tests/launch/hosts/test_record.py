"""What a host's record keeps, and when it cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.coordination.replicated.quorum import Configuration, Voters
from outlast.launch.hosts.replicated.past import Config, Group
from outlast.launch.hosts.replicated.record import Record, open_record

NET_S = 60.0


def opened(folder: Path) -> Record:
    return open_record("run", [("h1", 1)], "h1", str(folder))


def group(name: str) -> Group:
    return Group(name, 1, Config(0, Voters(Configuration(frozenset([name])))))


def test_it_outlives_its_process_in_a_folder_that_is_made_with_those_above(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    first = opened(folder)
    assert first.durable
    assert folder.stat().st_mode & 0o777 == 0o700
    first.begin("h1-first")
    written = threading.Event()
    first.set_later(first.past.with_group(group("h2")), written.set)
    assert written.wait(NET_S)
    first.close()
    second = opened(folder)
    assert [each.id for each in second.past.groups] == ["h2"]
    assert second.past.out == {"h1-first"}
    second.close()


def test_a_host_that_was_killed_is_out_for_the_next_one_at_its_address(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    here = run()
    host = here.host(2, record_dir=str(tmp_path / "records"))
    joined = host.joined()
    host.close()
    record = open_record(here.run_id, here.endpoints, host.address, str(tmp_path / "records"))
    assert record.past.out == {joined["id"]}
    record.close()


def test_what_is_on_its_way_when_the_host_leaves_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has left in order is asked by nobody: a record would keep the others waiting."""
    record = opened(tmp_path / "records")
    record.begin("h1-first")
    may_write, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert may_write.wait(NET_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    written = [threading.Event(), threading.Event()]
    for event, name in zip(written, ("h2", "h3"), strict=True):
        record.set_later(record.past.with_group(group(name)), event.set)
    leaving = threading.Thread(target=record.remove)
    leaving.start()
    may_write.set()
    leaving.join()
    assert all(event.wait(NET_S) for event in written)
    record.close()
    assert list((tmp_path / "records").glob("*.json")) == []


def test_a_folder_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    record = opened(folder)
    assert not record.durable
    assert "is not a private folder of this user" in caplog.text
    record.close()
