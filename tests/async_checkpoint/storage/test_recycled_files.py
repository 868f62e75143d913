"""Files of a removed checkpoint are overwritten; no checkpoint still in use changes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from async_checkpoint.calls.work import Gate
from async_checkpoint.checkpoints import NET, folder_of, left_over, valid_steps
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.fence import Credentials
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.recycled_files import RECYCLED, RecycledFiles
from outlast.async_checkpoint.writer import client
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.write_files import write_files
from outlast.events.emitter import MemorySink
from outlast.events.event import Event
from outlast.events.types import CheckpointRemoved
from outlast.system.shared_memory import SharedMemory
from procs import Job

ELEMENTS = 1 << 18


@pytest.fixture(autouse=True)
def _file_system_supports_it(tmp_path: Path) -> None:
    if not RecycledFiles(tmp_path)._supported:
        pytest.skip("files are not written over on this file system")


class Removals(MemorySink):
    """Reports removals of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Semaphore(0)

    def write(self, event: Event) -> None:
        super().write(event)
        if isinstance(event, CheckpointRemoved):
            self.told.release()


class Saving:
    """Saves one checkpoint after another, and keeps the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._removals = Removals()
        self.checkpointer = Checkpointer(path, keep=Retention(last=1), events=self._removals)

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()

    def save(self, elements: int = ELEMENTS) -> Path:
        """Returns when the previous one is removed, or its files are ready to be overwritten."""
        self.count += 1
        step = self.count
        self.checkpointer.save(step, {"w": torch.full((elements,), float(step))}).wait(NET)
        if step > 1:
            assert self._removals.told.acquire(timeout=60)
            self.checkpointer.session.writer.request(Writer.await_removals, tidy=False)
        found = {"w": torch.zeros(elements)}
        assert self.checkpointer.restore(found, step=step) == step
        assert torch.equal(found["w"], torch.full((elements,), float(step)))
        assert self.checkpointer.verify(step).step == step
        return folder_of(self.path, step) / "__0_0.distcp"


def test_a_save_writes_over_the_files_of_the_checkpoint_removed_last(tmp_path: Path) -> None:
    with Saving(tmp_path) as saving:
        files = {saving.save().stat().st_ino for _ in range(6)}
        assert len(files) == 2  # one that exists, one that is being written
        survey = folders.survey(LocalStorage(str(tmp_path)))
        (found,) = [each for each in survey if each.step is None]
        assert "writes over" in found.wrong
    assert valid_steps(tmp_path) == [6]
    assert left_over(tmp_path) == []


def keep_open(file: Path) -> Callable[[], bytes]:
    opened = file.open("rb")

    def content() -> bytes:
        with opened:
            return opened.read()

    return content


def keep_mapped(file: Path) -> Callable[[], bytes]:
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)

    def content() -> bytes:
        with mapped:
            return mapped.read()

    return content


def keep_linked(file: Path) -> Callable[[], bytes]:
    link = file.parents[1] / "backup"
    os.link(file, link)
    return link.read_bytes


@pytest.mark.parametrize("keep", [keep_open, keep_mapped, keep_linked])
def test_a_file_that_is_still_used_does_not_change(
    tmp_path: Path, keep: Callable[[Path], Callable[[], bytes]]
) -> None:
    with Saving(tmp_path) as saving:
        file = saving.save()
        expected = file.read_bytes()
        content = keep(file)
        for _ in range(4):
            saving.save()
        assert content() == expected


def test_files_of_another_size_are_not_written_over(tmp_path: Path) -> None:
    with Saving(tmp_path) as saving:
        for elements in (ELEMENTS, 2 * ELEMENTS, ELEMENTS // 2, ELEMENTS, ELEMENTS):
            saving.save(elements)


@pytest.mark.parametrize("what", ["protected", "a hole", "a link", "a pipe"])
def test_a_changed_file_is_not_written_over(tmp_path: Path, what: str) -> None:
    size = 1 << 20
    recycled = RecycledFiles(tmp_path)
    (tmp_path / "hidden").mkdir()
    file = tmp_path / "hidden" / "file"
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a link":
        (tmp_path / "elsewhere").write_bytes(bytes(size))
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(b"" if what == "a hole" else bytes(size))
        os.truncate(file, size)
        file.chmod(0o444 if what == "protected" else 0o644)
    assert recycled.keep(tmp_path / "hidden")
    assert not recycled.take(tmp_path / "file", size)
    assert not os.path.lexists(tmp_path / "file")
    recycled.drop()


def test_the_next_job_removes_recycled_files(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.save()
    saving.save()
    saving.checkpointer.abort()
    saving.checkpointer.session.close(0.0)  # as if it had been killed: nothing is cleaned up
    assert (tmp_path / RECYCLED).is_dir()
    with Checkpointer(tmp_path):
        assert not (tmp_path / RECYCLED).exists()
    assert valid_steps(tmp_path) == [2]


def test_recycled_files_are_removed_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.make("step-00000001")
    storage.put("step-00000001", "other", bytes(8192))
    storage.recycle(storage.hide("step-00000001"))
    allocate = os.posix_fallocate
    asked = []

    def full(fd: int, offset: int, size: int) -> None:
        if (tmp_path / RECYCLED).exists():
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        allocate(fd, offset, size)

    def make_room() -> None:
        asked.append(True)
        storage.tidy()

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = SharedMemory(4096)
    write_files(
        storage,
        "a",
        memory.view,
        [("file", 0, 4096)],
        {},
        threads=1,
        dropped=threading.Event(),
        make_room=make_room,
    )
    memory.close()
    assert asked == [True]
    assert storage.get("a", "file") == bytes(4096)


def test_a_link_to_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    """A checkpoint that the user has moved to an archive, leaving a link to it."""
    archive = tmp_path / "archive"
    archive.mkdir()
    with Saving(tmp_path / "c") as saving:
        moved = archive / "step"
        saving.save().parent.rename(moved)
        folder_of(tmp_path / "c", 1).symlink_to(moved)
        expected = {file.name: file.read_bytes() for file in moved.iterdir()}
        for _ in range(3):
            saving.save()
        assert {file.name: file.read_bytes() for file in moved.iterdir()} == expected
    assert left_over(tmp_path / "c") == []


def test_a_file_that_cannot_be_taken_is_no_error(tmp_path: Path) -> None:
    (tmp_path / RECYCLED).symlink_to(tmp_path / "loop")
    (tmp_path / "loop").symlink_to(tmp_path / RECYCLED)
    recycled = RecycledFiles(tmp_path)
    assert not recycled.take(tmp_path / "file", 4096)
    (tmp_path / "hidden").mkdir()
    assert recycled.keep(tmp_path / "hidden")
    assert not recycled.keep(tmp_path / "gone")
    recycled.drop()
    assert not os.path.lexists(tmp_path / RECYCLED)
    assert os.path.lexists(tmp_path / "loop")


def test_files_that_rank_0_keeps_while_another_rank_makes_room_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recycled, hidden = RecycledFiles(tmp_path), tmp_path / ".tmp-removed-step-00000001-0"
    for folder in (tmp_path / RECYCLED, hidden):
        folder.mkdir()
        (folder / "file").write_bytes(b"content")

    def keep_first(path: str, **options: int) -> None:  # between the last unlink and the rmdir
        monkeypatch.undo()
        assert recycled.keep(hidden)
        os.rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", keep_first)
    recycled.drop()
    assert os.listdir(tmp_path) == [RECYCLED]
    recycled.drop()
    assert os.listdir(tmp_path) == []


def end_session(checkpointer: Checkpointer, gate: Gate) -> None:
    """Ends as at exit; opens the gate after the writer has been told."""
    session = checkpointer.session
    end = threading.Thread(target=session.close, args=(60.0,))
    end.start()
    limit = time.monotonic() + 60
    while not session.writer._closed:
        assert time.monotonic() < limit
        time.sleep(0.01)
    gate.open()
    end.join()


def test_checkpoints_that_are_hidden_during_the_end_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    plan.set({"op": "hide", "do": "wait"})
    gate = plan.gate()
    checkpointer = Checkpointer(path, keep=Retention(last=1))
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(ELEMENTS)}).wait(NET)
    gate.arrived()
    checkpointer.abort()
    end_session(checkpointer, gate)
    assert valid_steps(path) == [2]
    assert left_over(path) == []


ENDS = {
    "returns": {0: 0, 1: 0},
    "SIGTERM": {0: 143, 1: 143},
    "SystemExit": {0: 3, 1: 3},
    "exception": {0: 1, 1: 1},
    "RestartAbort": {},
    "RestartAbort during a save": {},
}


def test_the_files_of_a_dropped_save_are_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    plan.set({"op": "finish", "do": "wait"})
    gate = plan.gate()
    checkpointer = Checkpointer(path)
    checkpointer.save(1, {"w": torch.ones(ELEMENTS)})
    gate.arrived()
    assert left_over(path) != []
    checkpointer.abort()
    end_session(checkpointer, gate)
    assert valid_steps(path) == []
    assert left_over(path) == []


def test_a_request_that_the_end_cuts_short_leaves_the_writer_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the saves finds the channel closed, and the writer still tidies up. It must not
    take it for one that is lost, and kill it: on a busy machine that came first.
    """
    monkeypatch.setattr(client, "_EXIT_S", 0.0)
    path = tmp_path / "c"
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    checkpointer = Checkpointer(path, keep=Retention(last=1))
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(ELEMENTS)}).wait(NET)
    plan.set({"op": "finish", "do": "wait"})
    gate = plan.gate()
    checkpointer.save(3, {"w": torch.ones(ELEMENTS)})
    gate.arrived()
    checkpointer.abort()
    end_session(checkpointer, gate)
    assert valid_steps(path) == [2]
    assert left_over(path) == []


@pytest.mark.parametrize("fenced", [False, True])
def test_another_writer_tidies_up_after_one_that_was_lost(tmp_path: Path, fenced: bool) -> None:
    """Not what may be a save in progress of another group of hosts, which has the folder now."""
    path = tmp_path / "c"
    with Checkpointer(path, keep=Retention(last=1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(ELEMENTS)}).wait(NET)
        session = checkpointer.session
        limit = time.monotonic() + NET.total_seconds()
        while not (path / RECYCLED).exists():  # after the handle of the save has ended
            assert time.monotonic() < limit
            time.sleep(0.01)
        working, _ = session.storage.names_for(3, "0" * 20)
        (path / working).mkdir()
        (path / working / "part").write_bytes(b"x")
        process = session.writer._process
        assert process is not None
        process.channel._shut_down()  # as an interrupt in the middle of a message does
        if fenced:
            session.credentials = Credentials("another", str(tmp_path / "no lease"))
    assert valid_steps(path) == [2]
    assert left_over(path) == ([working] if fenced else [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_recycled_files_are_gone_after_every_end(
    ranks: Callable[..., Job], tmp_path: Path, how: str
) -> None:
    with ranks("ends", "ends", str(tmp_path / "c"), how) as job:
        job.start_all()
        codes = job.wait_all(60)
        if ENDS[how]:
            assert codes == ENDS[how], (job.errors(0) + job.errors(1))[-4000:]
        for rank in range(2):
            assert [line["event"] for line in job.lines(rank)] == ["ending"], job.errors(rank)
            assert "could not be removed" not in job.errors(rank)
            # In the log; it may also be the exception that the end of the job interrupts.
            lines = job.errors(rank).splitlines()
            assert not any(line.startswith("the save of step") for line in lines), lines
    # The writer of rank 1 may begin its part of the dropped save after rank 0 has removed it.
    left = [name for name in left_over(tmp_path / "c") if "save" not in how or name == RECYCLED]
    assert left == []
