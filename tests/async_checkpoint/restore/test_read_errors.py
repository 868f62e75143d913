"""A read error is not damage: it is tried again, then raised; no older checkpoint is taken."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_checkpoint.checkpoints import (
    blank,
    folder_of,
    restored,
    same,
    save_steps,
    state_of,
    valid_steps,
)
from async_checkpoint.made import save
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.storage import directory, system_errors
from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.errors import CheckpointError, CheckpointReadError
from outlast.events.emitter import MemorySink
from outlast.launch.cli import app
from procs import Job

Ranks = Callable[..., Job]
PASSING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ETIMEDOUT)
TENSORS, VALUES = "__0_0.distcp", "__0_values.distcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_steps(tmp_path / "c", 1, 2)
    return tmp_path / "c"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are left out."""
    found: list[float] = []
    monkeypatch.setattr(system_errors, "_pause", found.append)
    return found


class Failing:
    """Makes the real calls on one file fail, `times` times: to open it, or for EIO and ESTALE to
    read it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, path: Path, number: int, times: int) -> None:
        self.left = times
        error = OSError(number, os.strerror(number), str(path))
        open_file, preadv = os.open, os.preadv

        def fail(name: object, kind: str) -> None:
            reads = number in (errno.EIO, errno.ESTALE)
            if str(name) == str(path) and (kind == "read") == reads and self.left > 0:
                self.left -= 1
                raise error

        def opened(name: Any, *args: Any, **kwargs: Any) -> int:
            fail(name, "open")
            return open_file(name, *args, **kwargs)

        def read(descriptor: int, *args: Any) -> int:
            fail(os.readlink(f"/proc/self/fd/{descriptor}"), "read")
            return preadv(descriptor, *args)

        patch.setattr(os, "open", opened)
        patch.setattr(os, "preadv", read)


EACH = [(name, number) for name in (MANIFEST, TENSORS, VALUES) for number in PASSING]


def test_an_error_that_passes_is_survived(path: Path, pauses: list[float]) -> None:
    with Checkpointer(path) as checkpointer:
        for name, number in EACH:
            with pytest.MonkeyPatch.context() as patch:
                failing = Failing(patch, folder_of(path, 2) / name, number, 2)
                state = blank()
                assert checkpointer.restore(state) == 2
                assert same(state, state_of(2))
                assert failing.left == 0
                failing.left = 2
                assert checkpointer.verify(2).step == 2
                assert failing.left == 0
    assert len(pauses) == 4 * len(EACH)


def test_an_error_that_stays_is_raised_and_nothing_is_lost(path: Path) -> None:
    sink = MemorySink()
    with Checkpointer(path, events=sink) as checkpointer:
        for name, number in EACH:
            file = folder_of(path, 2) / name
            with pytest.MonkeyPatch.context() as patch:
                Failing(patch, file, number, 10**9)
                for use in (lambda: checkpointer.restore(blank()), lambda: checkpointer.verify(2)):
                    with pytest.raises(CheckpointReadError) as caught:
                        use()
                    text = str(caught.value)
                    assert str(file) in text
                    assert errno.errorcode[number] in text
                    assert os.uname().nodename in text
        assert not sink.events
        state = blank()
        assert checkpointer.restore(state) == 2  # as soon as it can be read
        assert same(state, state_of(2))
    assert valid_steps(path) == [1, 2]


def test_what_cannot_be_read_is_not_left_out_of_the_list(path: Path) -> None:
    """What is restored, trusted and removed depends on it."""
    with Checkpointer(path) as checkpointer, pytest.MonkeyPatch.context() as patch:
        Failing(patch, folder_of(path, 2) / MANIFEST, errno.EIO, 10**9)
        with pytest.raises(CheckpointReadError, match="EIO"):
            checkpointer.checkpoints()


def test_retention_removes_nothing_while_a_manifest_cannot_be_read(path: Path) -> None:
    checkpointer = Checkpointer(path, keep=Retention(last=1))
    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, folder_of(path, 2) / MANIFEST, errno.EIO, 10**9)
        checkpointer.save(3, state_of(3)).wait()
        checkpointer.close()
    assert valid_steps(path) == [1, 2, 3]
    assert restored(path) == 3


def replaced(file: Path, kind: str) -> None:
    """Puts something that is no regular file in the place of a file."""
    content = file.read_bytes()
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "link":
        file.with_name("other").write_bytes(content)
        file.symlink_to(file.with_name("other"))
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        os.mknod(file, stat.S_IFSOCK | 0o600)


def test_what_is_no_regular_file_of_its_size_is_damage(path: Path, tmp_path: Path) -> None:
    damage: list[Callable[[Path], None]] = [
        functools.partial(replaced, kind=kind)
        for kind in ("directory", "link", "loop", "pipe", "socket")
    ]
    damage += [
        lambda file, by=by: os.truncate(file, file.stat().st_size + by)  # type: ignore[misc]
        for by in (-1, 1, 1 << 40)
    ]
    with Checkpointer(path) as checkpointer:
        shutil.copytree(folder_of(path, 2), tmp_path / "whole")
        for name in (MANIFEST, TENSORS, VALUES):
            for harm in damage:
                harm(folder_of(path, 2) / name)
                state = blank()
                assert checkpointer.restore(state) == 1
                assert same(state, state_of(1))
                with pytest.raises(CheckpointError) as caught:
                    checkpointer.verify(2)
                assert not isinstance(caught.value, CheckpointReadError)
                shutil.rmtree(folder_of(path, 2))
                shutil.copytree(tmp_path / "whole", folder_of(path, 2))
        assert checkpointer.restore(blank()) == 2


@pytest.fixture
def unreadable(path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, folder_of(path, 2) / MANIFEST, errno.EIO, 10**9)
        yield path


def test_the_commands_say_that_it_cannot_be_read(unreadable: Path) -> None:
    runner, path = CliRunner(), str(unreadable)
    done = runner.invoke(app, ["checkpoint", "ls", path])
    assert done.exit_code == 74
    assert "unreadable: step 2: " in done.output
    assert "EIO" in done.output
    done = runner.invoke(app, ["checkpoint", "ls", "--json", path])
    assert done.exit_code == 74
    assert '"state": "unreadable"' in done.output
    done = runner.invoke(app, ["checkpoint", "verify", path])
    assert done.exit_code == 74
    assert "step 1: every byte" in done.output
    assert "EIO" in done.output
    file = path + ".pt"
    done = runner.invoke(app, ["checkpoint", "export", path, "-o", file])
    assert (done.exit_code, Path(file).exists()) == (74, False)
    assert "EIO" in done.output
    done = runner.invoke(app, ["checkpoint", "diff", path, path, "--step-a", "1"])
    assert done.exit_code == 2
    assert "EIO" in done.output
    assert runner.invoke(app, ["checkpoint", "export", path, "--step=1", "-o", file]).exit_code == 0
    with open(folder_of(unreadable, 1) / TENSORS, "ab") as tensors:
        tensors.write(b"x")
    assert runner.invoke(app, ["checkpoint", "verify", path]).exit_code == 1
    done = runner.invoke(app, ["checkpoint", "rm", "--yes", path, "2"])
    assert done.exit_code == 1
    assert "no valid checkpoint would be left" in done.output
    assert folder_of(unreadable, 2).is_dir()


def test_every_rank_raises_it(ranks: Ranks, tmp_path: Path) -> None:
    with ranks("uneven", "one_cannot_read", str(tmp_path / "c"), "", nprocs=2) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Forbidden"),  # 403, from s3fs
        OSError(errno.EBUSY, "Please reduce your request rate."),  # 503
        TimeoutError("the read timed out"),
        RuntimeError("an exception of the library below"),
    ],
)
def test_an_error_of_the_store_is_not_damage(error: Exception, tmp_path: Path) -> None:
    storage = RemoteStorage(f"memory://{tmp_path.name}")
    folder = save(storage, 3)
    failures = [error, error]
    cat_file = storage._fs.cat_file

    def failing(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return cat_file(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage._fs, "cat_file", failing)
        assert directory.verify_folder(storage, folder).step == 3
        failures += [error] * 100
        with pytest.raises(CheckpointReadError, match=error.args[-1]):
            directory.verify_folder(storage, folder)
        (found,) = directory.survey(storage)
        assert found.unread
    storage._fs.rm_file(storage._inside(folder, TENSORS))
    with pytest.raises(CheckpointError, match=TENSORS) as caught:
        directory.verify_folder(storage, folder)
    assert not isinstance(caught.value, CheckpointReadError)


def test_an_error_of_close_says_nothing_about_what_was_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def fails(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if name.endswith(".distcp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fails)
    assert restored(path) == 2
