"""C4: a full disk, a read-only disk, and a folder that two jobs use at once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from async_checkpoint.checkpoints import (
    NET,
    blank,
    left_over,
    restored,
    same,
    save_steps,
    state_of,
    valid_steps,
)
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.errors import CheckpointError, FolderInUse
from procs import Job

Ranks = Callable[..., Job]


def test_a_full_disk(small_disk: Path) -> None:
    large = {"x": torch.zeros(400_000)}
    with Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        for step in (2, 3):  # each leaves the free space unchanged
            handle = checkpointer.save(step, large)
            with pytest.raises(CheckpointError, match=r"rank 0 on .*No space left on device") as e:
                handle.wait(NET)
            assert str(e.value).endswith(f". Make room in {small_disk}")
            assert not e.value.of_another_rank
            assert left_over(small_disk) == []
        state = blank()
        assert checkpointer.restore(state, step=1) == 1
        assert same(state, state_of(1))
        checkpointer.save(4, state_of(4)).wait(NET)
    assert valid_steps(small_disk) == [1, 4]
    assert restored(small_disk) == 4


def test_a_disk_without_room_for_the_manifest(small_disk: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    with Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
        handle = checkpointer.save(2, {"x": torch.zeros(free - 2 * page, dtype=torch.uint8)})
        with pytest.raises(CheckpointError, match=r"could not commit it.*No space left on device"):
            handle.wait(NET)
    assert valid_steps(small_disk) == [1]
    assert left_over(small_disk) == []


def test_a_folder_without_write_permission(small_disk: Path) -> None:
    save_steps(small_disk, 1)
    with Checkpointer(small_disk) as checkpointer:
        # Mounted over it, since it has files open for writing.
        subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
            handle = checkpointer.save(2, state_of(2))
            with pytest.raises(CheckpointError, match="Read-only file system"):
                handle.wait(NET)
            state = blank()
            assert checkpointer.restore(state, step=1) == 1
            assert same(state, state_of(1))
            checkpointer.close()
            with pytest.raises((CheckpointError, OSError), match="Read-only file system"):
                Checkpointer(small_disk)
        finally:
            subprocess.run(["umount", str(small_disk)], check=True)
    assert restored(small_disk) == 1


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, OSError), match=r"File exists|Not a directory"):
        Checkpointer(tmp_path / "file")
    with Checkpointer(tmp_path / "folder"):
        pass


def test_two_jobs_in_one_folder(ranks: Ranks, tmp_path: Path) -> None:
    with ranks("lives", "trains", str(tmp_path), nprocs=1) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: line["event"] == "restored")
        with pytest.raises(FolderInUse) as error:
            Checkpointer(tmp_path)
        assert f"{tmp_path} is in use by another job (process {job.pid(0)} on" in str(error.value)
        job.wait_for_line(0, lambda line: line["event"] == "committed")
        job.send(0, signal.SIGKILL)
        job.wait(0)
    assert restored(tmp_path) is not None  # the lock has ended with its owner


def test_a_second_checkpointer_of_a_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("folder")
    first = Checkpointer("folder", keep=Retention(last=1))
    handle = first.save(1, state_of(1))
    for name in ("folder", "link", str(tmp_path / "folder")):
        with pytest.raises(ValueError, match=rf"already has a .* for {tmp_path}/folder: use that"):
            Checkpointer(name, threads=1)
    handle.result(NET)
    first.save(2, state_of(2)).result(NET)
    first.close()
    assert valid_steps(tmp_path / "folder") == [2]
    with Checkpointer("link") as second:
        second.save(3, state_of(3)).result(NET)
    assert valid_steps(tmp_path / "folder") == [2, 3]


def test_a_url_of_the_same_folder_is_no_other_folder(tmp_path: Path) -> None:
    with Checkpointer(tmp_path), pytest.raises(ValueError, match="already has a Checkpointer"):
        Checkpointer(f"file://{tmp_path}/")
    with Checkpointer(f"file://{tmp_path}"), pytest.raises(ValueError, match="already has a"):
        Checkpointer(tmp_path)


def test_the_options_of_the_next_checkpointer_count(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path, threads=1)
    first.save(1, state_of(1)).result(NET)
    writer = first.session.writer
    first.abort()
    with Checkpointer(tmp_path, threads=3) as second:
        assert second.session.writer is not writer
        assert second.session.options[0] == 3
        second.save(2, state_of(2)).result(NET)
    assert valid_steps(tmp_path) == [1, 2]


def test_the_next_checkpointer_of_a_process_takes_over(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path)
    first.save(1, state_of(1)).wait(NET)
    pid, memory = first.session.writer.pid, first.session.pool.buffers[0].memory
    handle = first.save(2, state_of(2))
    first.abort()
    with Checkpointer(tmp_path) as second:
        with pytest.raises(ValueError, match="closed"):
            first.save(3, state_of(3))
        assert handle._await_end(60)
        state = blank()
        assert (
            second.restore(state) == 2
        )  # the snapshot was complete, whatever the outcome of its save
        assert same(state, state_of(2))
        second.save(4, state_of(4)).wait(NET)
        assert second.session.writer.pid == pid
        assert second.session.pool.buffers[0].memory is memory
        first.close()
        second.save(5, state_of(5)).wait(NET)
    assert restored(tmp_path) == 5


def test_an_interrupted_abort_is_completed_by_the_next_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart in place interrupts the function again until it has left."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    for broken in ("seal", "tell"):
        first = Checkpointer(tmp_path, overlap=optimizer)
        handle = first.save(1, net.state_dict())

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if broken == "seal":
                patch.setattr(first.saves.pending[0].taken, "_copy_failure", interrupt)
            else:
                patch.setattr(first.session.writer, "tell", interrupt)
            with pytest.raises(KeyboardInterrupt):
                first.abort()
        second = Checkpointer(tmp_path)
        assert handle._await_end(60)
        assert first.saves._thread is not None
        first.saves._thread.join(60)
        assert not first.saves._thread.is_alive()
        second.close()
    assert len(_global_optimizer_pre_hooks) == 0
    assert valid_steps(tmp_path) == []


def test_leftovers_of_saves_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / RECYCLED).mkdir()
    for name in (".tmp-step-00000002-abc", ".tmp-removed-step-00000003-1", ".tmp-x-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-of-mine").mkdir()
    with caplog.at_level(logging.INFO):
        assert restored(tmp_path) == 1
    assert "removed .tmp-step-00000002-abc, left by an unfinished save" in caplog.text
    assert RECYCLED not in caplog.text  # no save has left the recycled files
    assert left_over(tmp_path) == ["notes"]
    assert (tmp_path / "step-of-mine").exists()
