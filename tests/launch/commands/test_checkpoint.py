"""`outlast checkpoint`: what it prints, what it refuses, and that it ends with clear errors."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest
from click.testing import Result

from async_checkpoint.made import save
from launch.checkpoint_command import outlast
from outlast.async_checkpoint.storage.directory import open_storage
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import MANIFEST

FILE = "__0_0.distcp"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(str(tmp_path / "run"))
    for step in (10, 20, 30):
        save(storage, step, metric=step / 8)
    return storage


def flip(storage: LocalStorage, step: int, name: str = FILE, at: int = 1500) -> None:
    path = storage.root / f"step-{step:08d}" / name
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def error(result: Result) -> str:
    assert result.exit_code == 1, result.output
    text = str(result.stderr)
    assert text.startswith("outlast: error: ")
    assert "Traceback" not in text
    return text


def test_a_table_of_all_that_is_there(storage: LocalStorage) -> None:
    flip(storage, 20, MANIFEST, at=-3)
    (storage.root / "step-00000030" / FILE).write_bytes(b"short")
    storage.make(".tmp-step-00000040-aa")
    storage.make(".tmp-removed-step-00000005-aa")
    for step, age_s in ((10, 2 * 3600 + 60), (20, 3 * 60 + 5)):
        path = storage.root / f"step-{step:08d}" / MANIFEST
        os.utime(path, (0, time.time() - age_s))
    result = outlast("ls", storage.root)
    assert result.exit_code == 0
    title, *rows = result.stdout.splitlines()
    assert title.split() == ["step", "age", "size", "ranks", "metric", "tensors", "state"]
    assert rows[0].split() == ["10", "2", "h", "2.6", "kB", "2", "1.25", "1", "whole"]
    assert rows[1].split() == ["20", "3", "min", "-", "-", "-", "-", "damaged"]
    assert rows[2].split()[-1] == "damaged"
    # Below the table, so that they need not fit into a column.
    assert rows[3] == "damaged: step 20: manifest.json is damaged: its checksum does not match"
    assert rows[4] == f"damaged: step 30: {FILE}: 5 bytes instead of 2560"
    left = "removed, but its files are not deleted yet: .tmp-removed-step-00000005-aa"
    assert rows[5] == left
    assert rows[6] == "not committed: .tmp-step-00000040-aa"
    assert len(rows) == 7
    assert all(len(line) <= 80 for line in (title, *rows))


def test_the_same_as_json(storage: LocalStorage) -> None:
    flip(storage, 20, MANIFEST, at=-3)
    storage.make(".tmp-step-00000040-aa")
    os.utime(storage.root / "step-00000010" / MANIFEST, (0, 1_000_000_000))
    found = json.loads(outlast("ls", "--json", storage.root).stdout)
    assert found[0] == {
        "step": 10,
        "folder": "step-00000010",
        "saved_at": "2001-09-09T01:46:40+00:00",
        "size_bytes": 2560,
        "world_size": 2,
        "metric": 1.25,
        "tensors": 1,
        "state": "whole",
        "wrong": "",
    }
    assert [one["state"] for one in found] == ["whole", "damaged", "whole", "not committed"]
    assert "checksum" in found[1]["wrong"]


def test_an_empty_folder(tmp_path: Path) -> None:
    result = outlast("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"no checkpoints in {tmp_path}\n")
    assert json.loads(outlast("ls", "--json", tmp_path).stdout) == []
    assert "has no checkpoints" in error(outlast("verify", tmp_path))


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["rm", "--yes"]])
def test_a_folder_that_is_not_there(tmp_path: Path, command: list[str]) -> None:
    steps = [1] if command[0] == "rm" else []
    name = "not-there"
    assert f"{name} is not a folder" in error(outlast(*command, tmp_path / name, *steps))
    assert "nowhere" in error(outlast(*command, "nowhere://a", *steps))
    assert "it does not exist; give" in error(outlast(*command, tmp_path / name, *steps))
    (tmp_path / "file").touch()
    assert "file is not a folder: give the folder" in error(
        outlast(*command, tmp_path / "file", *steps)
    )
    assert not (tmp_path / name).exists()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert outlast("ls", tmp_path).exit_code == 0  # a checkpointer that has not saved yet
    for name in ("train.py", "data", "b", "c", "d", "e"):
        (tmp_path / name).mkdir()
    for command in (["ls"], ["ls", "--json"], ["verify"]):
        said = error(outlast(*command, tmp_path))
        assert f"{tmp_path} holds no checkpoints, but b, c, d, data, e, ... (6 in all): " in said
        assert "given to `Job` or `Checkpointer`" in said


def test_one_checkpoint_instead_of_the_folder_of_all(storage: LocalStorage) -> None:
    one = storage.root / "step-00000010"
    said = error(outlast("ls", one))
    assert f"{one} is a single checkpoint: give its parent, {one.parent}\n" in said


def test_all_are_verified_or_those_that_are_named(storage: LocalStorage) -> None:
    result = outlast("verify", storage.root)
    assert result.exit_code == 0
    good = [f"step {step}: every byte is as it was written, 2.6 kB" for step in (10, 20, 30)]
    assert result.stdout.splitlines() == good
    assert result.stderr == ""
    flip(storage, 20)
    result = outlast("verify", storage.root)
    assert result.stdout.splitlines() == [good[0], good[2]]
    assert f"step 20: {storage.root}/step-00000020 is damaged: {FILE}: " in error(result)
    assert outlast("verify", storage.root, 10, 30).exit_code == 0
    assert "damaged between bytes 1000 and 2000" in error(outlast("verify", storage.root, 20))
    assert "no checkpoint of step 5; it has [10, 20, 30]" in error(
        outlast("verify", storage.root, 5)
    )


def test_a_lost_manifest_is_damage(storage: LocalStorage) -> None:
    (storage.root / "step-00000020" / MANIFEST).unlink()
    assert "manifest.json is missing" in error(outlast("verify", storage.root))


def test_deleted_after_a_yes(storage: LocalStorage) -> None:
    result = outlast("rm", storage.root, 10, 20, stdin="y\n")
    assert result.exit_code == 0
    assert f"Delete steps 10, 20 from {storage.root}?" in result.stderr
    assert result.stdout.endswith("deleted step 10\ndeleted step 20\n")
    assert storage.folders() == ["step-00000030"]


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_kept_after_a_no_or_no_answer(storage: LocalStorage, answer: str) -> None:
    result = outlast("rm", storage.root, 10, stdin=answer)
    assert result.exit_code == 1
    assert "outlast: error: nothing was deleted" in result.stderr
    assert len(storage.folders()) == 3


def test_a_step_that_is_not_there(storage: LocalStorage) -> None:
    assert "no checkpoint of step 15; it has [10, 20, 30]" in error(
        outlast("rm", "--yes", storage.root, 10, 15)
    )
    assert len(storage.folders()) == 3


def test_the_last_valid_one_stays(storage: LocalStorage) -> None:
    flip(storage, 20, MANIFEST, at=-3)
    assert outlast("rm", "--yes", storage.root, 10).exit_code == 0
    # Step 20 exists but is damaged.
    said = error(outlast("rm", "--yes", storage.root, 30))
    assert "step 30: no valid checkpoint would be left" in said
    assert outlast("rm", "--yes", storage.root, 20).exit_code == 0
    assert outlast("rm", "--yes", "--force", storage.root, 30).exit_code == 0
    assert storage.folders() == []


def test_not_while_a_job_is_using_it(storage: LocalStorage) -> None:
    program = """
import sys
from outlast.async_checkpoint.storage.local import LocalStorage
LocalStorage(sys.argv[1]).lock("a training")
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(storage.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdin is not None
        job.stdout.readline()
        said = error(outlast("rm", "--yes", "--force", storage.root, 10))
        assert "in use by another job (a training)" in said
        assert outlast("ls", storage.root).exit_code == 0
        assert outlast("verify", storage.root).exit_code == 0
        job.stdin.close()
    assert len(storage.folders()) == 3
    assert outlast("rm", "--yes", storage.root, 10).exit_code == 0


def test_without_torch(storage: LocalStorage) -> None:
    program = """
import sys
from outlast.launch.cli import app
for arguments in (["ls"], ["ls", "--json"], ["verify"], ["rm", "--yes"]):
    steps = ["10"] if arguments[0] == "rm" else []
    app(["checkpoint", *arguments, sys.argv[1], *steps], standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(storage.root)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def test_the_bar_is_for_a_terminal_only(storage: LocalStorage) -> None:
    main, other = pty.openpty()
    program = "from outlast.launch.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", "verify", str(storage.root)],
        stdout=subprocess.PIPE,
        stderr=other,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        text=True,
        check=True,
    )
    os.close(other)
    drawn = os.read(main, 100_000).decode()
    os.close(main)
    assert "━" in drawn
    assert len(done.stdout.splitlines()) == 3


def test_an_object_store_of_which_another_machine_may_be_the_user() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    remote = open_storage(url)
    for step in (10, 20, 30):
        save(remote, step)
    remote.put("step-00000040-aa", FILE, b"half of it")
    remote.lock("this test")
    assert "in use by another job (this test)" in error(outlast("rm", "--yes", url, 10))
    remote.unlock()
    assert outlast("rm", "--yes", url, 10).exit_code == 0
    owner = b'{"owner": "a training", "host": "elsewhere"}'
    fsspec.filesystem("memory").pipe_file(f"{url}/.owner", owner)
    assert "(a training), as far as one can know" in error(outlast("rm", "--yes", url, 20))
    assert outlast("rm", "--yes", "--take-over", url, 20).exit_code == 0
    result = outlast("ls", url)
    _, row, left = result.stdout.splitlines()
    assert re.fullmatch(r" *30 +\d+ (s|min) +2\.6 kB +2 +- +1 +whole", row), row
    assert left == "not committed: step-00000040-aa"
    assert outlast("verify", url).exit_code == 0
