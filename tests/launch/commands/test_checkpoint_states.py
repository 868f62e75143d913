"""`outlast checkpoint` on a folder of states, and on one that was named by mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest

from async_checkpoint.made import save
from launch.commands.test_checkpoint import error, outlast
from outlast.async_checkpoint.named_files import MANIFEST, STATES, LocalStorage, new_checkpoint
from outlast.elastic.states.state_files import file_name


def counted(file: BinaryIO) -> None:
    file.write(b"1234")


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """Written as `save_all_states` does; three saves, of which the last one stays."""
    folder = tmp_path / "states"
    for _ in range(3):
        with new_checkpoint(LocalStorage(str(folder), STATES), 2) as checkpoint:
            checkpoint.add(file_name("model"), counted)
            checkpoint.add(file_name("a name/of any kind"), counted)
            checkpoint.commit()
    return folder


def test_a_folder_of_states_is_listed(states: Path) -> None:
    (states / ".tmp-states-00000004-abcdef").mkdir()
    (states / "states-00000009").mkdir()  # another program's: there is no manifest
    result = outlast("ls", states)
    assert result.exit_code == 0
    title, row, left = result.stdout.splitlines()
    assert title.split() == ["number", "age", "size", "ranks", "states", "state"]
    assert row.split()[:1] + row.split()[3:] == ["3", "8", "bytes", "2", "2", "whole"]
    assert left == "not committed: .tmp-states-00000004-abcdef"
    first, second = json.loads(outlast("ls", "--json", states).stdout)
    assert first.pop("saved_at").startswith("20")
    assert first == {
        "step": None,
        "number": 3,
        "folder": "states-00000003",
        "size_bytes": 8,
        "world_size": 2,
        "states": 2,
        "state": "whole",
        "wrong": "",
    }
    assert (second["number"], second["state"]) == (None, "not committed")


def test_what_is_damaged(states: Path) -> None:
    path = states / "states-00000003" / "model.state"
    path.write_bytes(b"123")
    said = outlast("ls", states).stdout
    assert "damaged: states 3: model.state: 3 bytes instead of 4" in said
    path.unlink()
    assert (
        "damaged: states 3: model.state: No such file or directory" in outlast("ls", states).stdout
    )
    (path.parent / MANIFEST).write_bytes(b"nonsense")
    assert "damaged: states 3: manifest.json" in outlast("ls", states).stdout


def test_every_byte_is_verified(states: Path) -> None:
    good = "states 3: every byte is as it was written, 8 bytes\n"
    assert outlast("verify", states).stdout == good
    assert outlast("verify", states, 3).stdout == good
    assert "no checkpoint of states 2; it has [3]" in error(outlast("verify", states, 2))
    (states / "states-00000003" / "model.state").write_bytes(b"1235")
    said = error(outlast("verify", states))
    assert "states 3: " in said
    assert "model.state: damaged between bytes 0 and 4" in said


def test_nothing_of_it_is_deleted(states: Path) -> None:
    assert "holds checkpoints of states" in error(outlast("rm", "--yes", states, 3))
    assert "states-00000003" in os.listdir(states)


def test_both_kinds_in_one_folder(states: Path) -> None:
    save(LocalStorage(str(states)), 10)
    lines = outlast("ls", states).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "number", "3"]
    found = json.loads(outlast("ls", "--json", states).stdout)
    assert [one["folder"] for one in found] == ["step-00000010", "states-00000003"]


def test_states_that_were_copied_to_an_object_store(states: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").put(f"{states}/", f"{url}/", recursive=True)
    title, row = outlast("ls", url).stdout.splitlines()
    assert title.split() == ["number", "age", "size", "ranks", "states", "state"]
    assert row.split()[:1] + row.split()[3:] == ["3", "8", "bytes", "2", "2", "whole"]
    (found,) = json.loads(outlast("ls", "--json", url).stdout)
    assert (found["number"], found["states"], found["state"]) == (3, 2, "whole")
    good = "states 3: every byte is as it was written, 8 bytes\n"
    assert outlast("verify", url).stdout == good
    assert "holds checkpoints of states" in error(outlast("rm", "--yes", url, 3))
    path = f"{url}/states-00000003/model.state"
    fsspec.filesystem("memory").pipe_file(path, b"1235")
    assert "model.state: damaged between bytes 0 and 4" in error(outlast("verify", url))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert outlast("ls", tmp_path).exit_code == 0  # a checkpointer that has not saved yet
    for name in ("train.py", "data", "b", "c", "d", "e"):
        (tmp_path / name).mkdir()
    for command in (["ls"], ["ls", "--json"], ["verify"]):
        said = error(outlast(*command, tmp_path))
        assert f"{tmp_path} holds no checkpoints, but b, c, d, data, e, ... (6 in all): " in said
        assert "given to `Job` or `Checkpointer`" in said


def test_one_checkpoint_instead_of_the_folder_of_all(states: Path, tmp_path: Path) -> None:
    save(LocalStorage(str(tmp_path / "run")), 10)
    for one in (states / "states-00000003", tmp_path / "run" / "step-00000010"):
        said = error(outlast("ls", one))
        assert f"{one} is a single checkpoint: give its parent, {one.parent}\n" in said


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file is not a folder: give the folder" in error(outlast("ls", tmp_path / "file"))
    assert "missing is not a folder: it does not exist; give" in error(
        outlast("ls", tmp_path / "missing")
    )


def test_without_torch(states: Path) -> None:
    program = """
import sys
from outlast.launch.cli import app
for arguments in (["ls"], ["ls", "--json"], ["verify"]):
    app(["checkpoint", *arguments, sys.argv[1]], standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(states)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
