"""`Job.text_file`: a log file whose length is part of the state."""

from __future__ import annotations

import csv
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from elastic.small_jobs import job
from outlast.elastic.job.by_rank import text_files


@pytest.fixture(autouse=True)
def _no_files_left() -> Iterator[None]:
    yield
    assert all(file.closed for file, _ in text_files._files.values())


def train(made: outlast.Job, steps: int, file: Any, value: str = "x") -> None:
    for _ in range(steps):
        made.model(torch.ones(1, 1)).sum().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        print(f"{made.steps + 1},{value}", file=file)
        made.step()


def rows(*steps: int) -> str:
    return "".join(f"{step},x\n" for step in steps)


def trained(path: Path, log: Path, steps: int, value: str = "x") -> None:
    with job(path, every=3, keep=9) as made:
        file = made.text_file(log)
        made.restore()
        train(made, steps, file, value)


def test_a_checkpoint_has_the_rows_up_to_its_step(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    trained(tmp_path / "c", log, 7)
    assert log.read_text() == rows(*range(1, 8))
    with log.open("a") as file:
        file.write("8,x\n9,")  # of a process that was killed
    with job(tmp_path / "c", keep=9) as made:
        own = made.text_file(log)
        assert made.restore() == 7
        assert log.read_text() == rows(*range(1, 8))
        train(made, 1, own)
    with job(tmp_path / "c", keep=9) as made:
        own = made.text_file(log)
        assert made.restore(step=3) == 3
        assert log.read_text() == rows(1, 2, 3)
        train(made, 1, own)
    assert log.read_text() == rows(1, 2, 3, 4)


def test_a_header_is_written_once(tmp_path: Path) -> None:
    """Also if the first job gets to no step: its initial state is that of an empty file."""
    log = tmp_path / "log.csv"
    for steps in (0, 0, 2, 1):
        with job(tmp_path / "c") as made:
            file = made.text_file(log)
            made.restore()
            if file.tell() == 0:
                print("step,x", file=file)
            train(made, steps, file)
    assert log.read_text() == "step,x\n" + rows(1, 2, 3)
    assert not (tmp_path / "log.csv.1").exists()


def test_it_is_a_text_file(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    with job(tmp_path / "c") as made:
        file = made.text_file(log)
        made.restore()
        assert file.tell() == 0
        writer = csv.DictWriter(file, ["step", "name"])
        writer.writeheader()
        writer.writerow({"step": 1, "name": "é\n"})
        print("plain", 2, file=file)
        file.writelines(["a\n", "b\n"])
        assert os.fstat(file.fileno()).st_size == log.stat().st_size == file.tell()
        file.seek(0)
        assert [*csv.reader(file)][1] == ["1", "é\n"]
        file.seek(0)
        assert file.readline() == "step,name\r\n"
        assert len([*file]) == 5
        file.seek(3)
        print("c", file=file)
        with file:
            pass
        assert file.closed
    assert log.read_bytes().endswith(b"a\nb\nc\n")


def test_the_file_of_an_earlier_run_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.csv"
    trained(tmp_path / "first", log, 2)
    trained(tmp_path / "second", log, 1)
    trained(tmp_path / "third", log, 3, "y")
    assert (tmp_path / "log.csv.1").read_text() == rows(1, 2)
    assert (tmp_path / "log.csv.2").read_text() == rows(1)
    other = log.read_text()
    assert other == "1,y\n2,y\n3,y\n"
    assert f"{log} is of an earlier run: it is kept as {log}.2" in caplog.text
    # The first job continues: this is not its file, and it must not cut it off.
    with job(tmp_path / "first") as made:
        made.text_file(log)
        with pytest.raises(ValueError, match="is not the file of step 2: it has other bytes"):
            made.restore()
    assert log.read_text() == other


@pytest.mark.parametrize("left", ["", "1,x\n"])
def test_rows_that_are_missing_are_said(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.csv"
    trained(tmp_path / "c", log, 2)
    log.write_text(left) if left else log.unlink()
    trained(tmp_path / "c", log, 1)
    assert log.read_text() == left + rows(3)
    assert f"it has {len(left)} bytes, and had 8 at the restored step" in caplog.text


def test_a_file_that_is_new_to_the_job_is_appended_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "c", tmp_path / "log", 2)
    (tmp_path / "other").write_text("before\n")
    trained(tmp_path / "c", tmp_path / "other", 1)
    assert (tmp_path / "other").read_text() == "before\n" + rows(3)
    assert "is not in the restored state" in caplog.text


def test_a_file_keeps_no_job(tmp_path: Path) -> None:
    with job(tmp_path / "c") as made:
        made.text_file(tmp_path / "log.csv")
        made.restore()
        model = weakref.ref(made.model)
    del made
    gc.collect()
    assert model() is None


def test_errors_of_use(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    with job(tmp_path / "c") as made:
        file = made.text_file(log)
        with pytest.raises(ValueError, match=r"call job\.restore"):
            print("early", file=file)
        (tmp_path / "same").symlink_to(log)
        with pytest.raises(ValueError, match="is a text file of this job already"):
            made.text_file(tmp_path / "same")
        with (
            job(tmp_path / "other") as other,
            pytest.raises(ValueError, match="or of another one"),
        ):
            other.text_file(log)
        made.restore()
        with pytest.raises(ValueError, match=r"before job\.restore"):
            made.text_file(tmp_path / "late")
    with job(tmp_path / "d") as made:
        made.text_file("/dev/null")
        with pytest.raises(ValueError, match="is no regular file"):
            made.restore()
    with pytest.raises(ValueError, match="closed"):
        print("late", file=file)


@pytest.mark.slow
def test_a_file_of_another_process_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    with job(tmp_path / "c") as made:
        file = made.text_file(log)
        made.restore()
        print("mine", file=file)
        code = (
            "import sys; from pathlib import Path; from elastic.small_jobs import job\n"
            "made = job(Path(sys.argv[1])); made.text_file(sys.argv[2]); made.restore()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "d"), str(log)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert "is a text file of a job in another process" in done.stderr
        assert log.read_text() == "mine\n"
    assert not (tmp_path / "log.csv.1").exists()


def test_a_save_fails_if_the_file_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(tmp_path / "c") as made:
        file = made.text_file(tmp_path / "log.csv")
        made.restore()
        train(made, 1, file)
        synced: list[int] = []

        def fsync(number: int) -> None:
            synced.append(number)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(text_files.os, "fsync", fsync)
            error = made.save().exception()
        assert synced == [file.fileno()]
        assert "No space left on device" in str(error)
        assert [info.step for info in made.checkpointer.checkpoints()] == [0]
