"""The order of fences, and which checkpoints they make stale."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_checkpoint.made import save
from outlast.async_checkpoint.storage import fence
from outlast.async_checkpoint.storage.directory import candidates, leftovers, list_checkpoints
from outlast.async_checkpoint.storage.fence import Credentials, Fenced, check, newest, raise_fence
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.protocol import Position
from outlast.errors import FolderInUse
from outlast.system import files, lease_page
from outlast.system.files import lock_file
from outlast.system.lease_page import LeasePage


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LeasePage]:
    page = LeasePage.create(tmp_path)
    page.renew(lease_page.now() + 1000.0)
    yield page
    page.close()


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(str(tmp_path / "c"))
    storage.prepare()
    return storage


def at(page: LeasePage, *order: int, run: str = "run") -> Position:
    return Position(run, order, str(page.path))


def steps(storage: LocalStorage) -> list[int]:
    return [info.step for info in list_checkpoints(storage)]


def test_the_newest_fence_counts(storage: LocalStorage, page: LeasePage) -> None:
    first = raise_fence(storage, at(page, 0, 0, 0))
    check(storage, first)
    second = raise_fence(storage, at(page, 0, 0, 1))
    check(storage, second)
    with pytest.raises(Fenced, match="the job has gone on without this process on"):
        check(storage, first)


def test_an_earlier_process_raises_no_fence(storage: LocalStorage, page: LeasePage) -> None:
    raise_fence(storage, at(page, 0, 1, 0))
    with pytest.raises(Fenced, match="fence 1"):
        raise_fence(storage, at(page, 0, 0, 7))
    raise_fence(storage, at(page, 0, 0, 0, run="the next run"))


def test_stopped_while_it_raised_a_fence(
    storage: LocalStorage, page: LeasePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the newest fence, and writes its own after that of a later process."""
    reads, goes_on = threading.Event(), threading.Event()
    real = fence.check_lease

    def stops(*args: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            reads.set()
            assert goes_on.wait(60)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fence, "check_lease", stops)
    caught: list[Exception] = []

    def late() -> None:
        try:
            raise_fence(storage, at(page, 0, 0, 0))
        except Fenced as e:
            caught.append(e)

    thread = threading.Thread(target=late)
    thread.start()
    assert reads.wait(60)
    mine = raise_fence(storage, at(page, 0, 0, 1))
    goes_on.set()
    thread.join()
    assert len(caught) == 1
    check(storage, mine)


def begin(storage: LocalStorage, step: int, save_id: str) -> None:
    storage.make(storage.names_for(step, save_id)[0])


def test_what_is_stale(storage: LocalStorage, page: LeasePage) -> None:
    raise_fence(storage, at(page, 0, 0, 0))
    begin(storage, 4, "aaaa")
    begin(storage, 5, "bbbb")
    save(storage, 1, save_id="cccc")
    raise_fence(storage, at(page, 0, 0, 1))
    save(storage, 4, save_id="aaaa")
    save(storage, 5, save_id="dddd")
    assert steps(storage) == [1, 5]
    (unfinished,) = [name for name in storage.folders() if "bbbb" in name]
    assert sorted(leftovers(storage)) == [unfinished, "step-00000004"]
    assert list(fence.stale(storage)) == ["step-00000004"]
    # A later fence does not make it whole. What a user puts back does not become stale.
    raise_fence(storage, at(page, 0, 0, 2))
    save(storage, 2, save_id="eeee")
    assert steps(storage) == [1, 2, 5]
    # The same step of a refused save replaces a whole one at most, and is not read.
    save(storage, 5, save_id="bbbb")
    assert steps(storage) == [1, 2]
    assert 5 not in [step for step, _ in candidates(storage)]


def test_committed_while_a_fence_is_raised(
    storage: LocalStorage, page: LeasePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check, before the fence lists the saves: the restore that follows finds it."""
    begin(storage, 4, "aaaa")
    real = storage.put_record

    def put(folder: str, name: str, content: bytes) -> None:
        real(folder, name, content)
        if name == "fence.json":
            save(storage, 4, save_id="aaaa")

    monkeypatch.setattr(storage, "put_record", put)
    raise_fence(storage, at(page, 0, 0, 0))
    assert steps(storage) == [4]


def test_an_unfinished_fence_does_not_count(storage: LocalStorage, page: LeasePage) -> None:
    mine = raise_fence(storage, at(page, 0, 0, 0))
    storage.make(".fence-00000002-aaaaaaaaaaaa")
    storage.make(".fence-00000003-aaaaaaaaaaaa")
    storage.put(".fence-00000003-aaaaaaaaaaaa", "fence.json", b'{"number": 3, "ru')
    check(storage, mine)
    for iteration in range(1, 9):
        raise_fence(storage, at(page, 0, 0, iteration))
    assert len([name for name in storage.folders() if name.startswith(".fence-")]) == 4
    found = newest(storage)
    assert found is not None
    assert found.number == 9


def test_without_a_lease(storage: LocalStorage, page: LeasePage) -> None:
    mine = raise_fence(storage, at(page, 0, 0, 0))
    page.renew(lease_page.now() - 2.0)
    with pytest.raises(Fenced, match=r"may not write to .*: its lease ended 2\.\d s ago"):
        check(storage, mine)
    with pytest.raises(Fenced, match="its lease ended"):
        raise_fence(storage, at(page, 0, 0, 1))
    with pytest.raises(Fenced, match="cannot be read"):
        check(storage, Credentials(mine.writer, str(page.path) + "-none"))


def test_the_lock_of_an_earlier_process_of_the_job(tmp_path: Path, page: LeasePage) -> None:
    """`fcntl` locks do not exclude the process itself, so another process holds the lock."""
    path = tmp_path / "c"
    holds = (
        "import sys\n"
        "from outlast.async_checkpoint.storage.local import LocalStorage\n"
        "from outlast.async_checkpoint.storage.protocol import Position\n"
        "storage = LocalStorage(sys.argv[1])\n"
        "storage.prepare()\n"
        "storage.lock('process 1 on a', position=Position('run', (0, 0, 3)))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        storage, other = LocalStorage(str(path)), LocalStorage(str(path))
        for position in (None, at(page, 0, 0, 3), at(page, 0, 0, 9, run="other")):
            with pytest.raises(FolderInUse, match=r"another job \(process 1 on a\)"):
                storage.lock("process 2 on b", position=position)
        storage.lock("process 2 on b", position=at(page, 0, 0, 4))
        assert "process 2 on b" in (path / ".lock").read_text()
        storage.unlock()
        other.lock("process 3 on c")  # the file of that name is free
        other.unlock()
        assert holder.stdin is not None
        holder.stdin.close()


def test_a_lock_file_that_was_replaced_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.write_text("old")
    real, replaced = files._lock_now, []

    def replace_first(descriptor: int) -> bool:
        if not replaced:
            replaced.append(True)
            (tmp_path / "new").write_text("new")
            (tmp_path / "new").rename(path)
        return real(descriptor)

    monkeypatch.setattr(files, "_lock_now", replace_first)
    descriptor = lock_file(path, "me")
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert path.read_text() == "me"
    os.close(descriptor)


def test_the_lock_of_another_group_of_the_same_run(page: LeasePage) -> None:
    mine = at(page, 0, 0, 1, run="job-second")
    assert mine.in_another_group(at(page, 0, 0, 4, run="job-first").signature)
    others = (at(page, 0, run="job-second"), at(page, 0, run="task-first"), at(page, 0, run="job"))
    for other in others:
        assert not mine.in_another_group(other.signature)
    for text in ("", "{}", "[1]", "process 1 on a"):
        assert not mine.in_another_group(text)
        assert not mine.replaces(text)
