"""An error at or after the rename of a commit: what is said is true, and nothing old is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_checkpoint.checkpoints import (
    NET,
    blank,
    folder_of,
    left_over,
    same,
    state_of,
    valid_steps,
)
from async_checkpoint.failing_calls import FailingCalls
from async_checkpoint.made import save as save_files
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.storage.directory import candidates, verify_folder
from outlast.async_checkpoint.storage.fence import raise_fence, stale
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import saved_by
from outlast.async_checkpoint.storage.protocol import Position
from outlast.errors import CheckpointError
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingCalls:
    return FailingCalls(tmp_path, monkeypatch)


def restored_state(path: Path, step: int) -> dict[str, object]:
    with Checkpointer(path) as checkpointer:
        state = blank()
        assert checkpointer.restore(state, step=step) == step
    return state


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("call", "how", "error"),
    [
        ("fsync", "error", errno.EIO),
        ("rename", "done", errno.ENOENT),
        ("rename", "done", errno.ENOTEMPTY),
        ("renameat2", "done", errno.ENOENT),
    ],
)
def test_an_error_after_the_rename_is_no_failure(
    tmp_path: Path, calls: FailingCalls, call: str, how: str, error: int, replaces: bool
) -> None:
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        step = 1 if replaces else 2
        target = path if call == "fsync" else folder_of(path, step)
        calls.set(call, str(target), error, how, last=1)
        checkpointer.save(step, state_of(7)).wait(NET)
        calls.clear()
        assert valid_steps(path) == sorted({1, step})
        state = blank()
        checkpointer.restore(state)
        assert same(state, state_of(7))
    assert left_over(path) == []
    assert same(restored_state(path, step), state_of(7))


def test_a_rename_that_cannot_be_made_durable(tmp_path: Path, calls: FailingCalls) -> None:
    """It is visible now, and after a power failure perhaps the older one is: both are kept."""
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        older = saved_by(LocalStorage(str(path)), folder_of(path, 1).name)
        calls.set("fsync", str(path))
        handle = checkpointer.save(1, state_of(7))
        with pytest.raises(
            CheckpointError, match=r"not known whether the save of step 1 was committed: rank 0: "
        ):
            handle.wait(NET)
        (kept,) = (name for name in left_over(path) if name.startswith(".tmp-"))
        storage = LocalStorage(str(path))
        assert saved_by(storage, kept) == older
        verify_folder(storage, kept)
        assert valid_steps(path) == [1]
        calls.clear()
        checkpointer.save(2, state_of(2)).wait(NET)
        checkpointer.close()
    assert same(restored_state(path, 1), state_of(7))
    assert left_over(path) == []


def test_a_rename_that_fails_commits_nothing(tmp_path: Path, calls: FailingCalls) -> None:
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        for step, call in ((1, "renameat2"), (2, "rename")):
            calls.set(call, str(folder_of(path, step)))
            with pytest.raises(CheckpointError, match=r"was not committed.*Input/output error"):
                checkpointer.save(step, state_of(7)).wait(NET)
            assert left_over(path) == []
        calls.clear()
    assert valid_steps(path) == [1]
    assert same(restored_state(path, 1), state_of(1))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_writer_killed_after_the_rename(
    tmp_path: Path, calls: FailingCalls, replaces: bool
) -> None:
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        step = 1 if replaces else 2
        call = "renameat2" if replaces else "rename"
        calls.set(call, str(folder_of(path, step)), how="after")
        checkpointer.save(step, state_of(7)).wait(NET)  # the next writer has made it durable
        calls.clear()
        checkpointer.save(3, state_of(3)).wait(NET)
    assert left_over(path) == []
    assert valid_steps(path) == sorted({1, step, 3})
    assert same(restored_state(path, step), state_of(7))


# ----------------------------------------------------- replaced without an atomic exchange

REPLACE = """
import sys
from outlast.async_checkpoint.storage import local
storage = local.LocalStorage(sys.argv[1])
local._exchange = lambda *_: False  # as on a file system without it
print(storage.publish(*sys.argv[2:]))
"""


def replaced(storage: LocalStorage, new: str) -> int:
    command = [sys.executable, "-c", REPLACE, storage.where, new, "step-00000001"]
    return subprocess.run(command, check=False).returncode


def first_visible(storage: LocalStorage) -> str:
    step, folder = candidates(storage)[0]
    assert step == 1
    verify_folder(storage, folder)
    return saved_by(storage, folder)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_at_every_moment_of_a_replacement_one_of_both_is_visible(
    tmp_path: Path, calls: FailingCalls, when: str
) -> None:
    seen = []
    for number in range(1, 20):
        storage = LocalStorage(str(tmp_path / f"c{number}"))
        save_files(storage, 1, save_id="aaaa")
        new, _ = storage.names_for(1, "bbbb")
        other = LocalStorage(str(tmp_path / f"d{number}"))
        save_files(other, 1, save_id="bbbb")
        os.rename(other.root / "step-00000001", storage.root / new)
        calls.set("any", how=when, first=number)
        code = replaced(storage, new)
        calls.clear()
        seen.append(first_visible(storage))
        storage.lock("the next job")
        assert first_visible(storage) == seen[-1]
        assert [folder for _, folder in candidates(storage)] == ["step-00000001"]
        storage.unlock()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert number > 6
    assert seen == sorted(seen)  # the older one, and from some moment on the newer one
    assert set(seen) == {"aaaa", "bbbb"}


def test_the_next_save_completes_a_replacement_that_failed(
    tmp_path: Path, calls: FailingCalls
) -> None:
    storage = LocalStorage(str(tmp_path / "c"))
    save_files(storage, 1, save_id="aaaa")
    (storage.root / "step-00000001").rename(storage.root / "step-00000001-new")
    save_files(storage, 1, save_id="0000")
    assert first_visible(storage) == "aaaa"
    storage.settle()
    assert storage.folders()[-1] == "step-00000001"
    assert first_visible(storage) == "aaaa"


# ---------------------------------------------------------------------------------- fences


def test_what_was_committed_by_an_exchange_is_not_refused(tmp_path: Path) -> None:
    """Rank 0 was killed before it removed the older checkpoint from the name of the new one."""
    storage = LocalStorage(str(tmp_path / "c"))
    save_files(storage, 1, save_id="aaaa")
    working, _ = storage.names_for(1, "bbbb")
    page = LeasePage.create(tmp_path)
    page.renew(lease_page.now() + 1000.0)
    try:
        assert save_files(storage, 1, save_id="bbbb") == "step-00000001"
        assert working in storage.folders()
        raise_fence(storage, Position("run", (0, 0, 1), str(page.path)))
        assert stale(storage) == {}
        assert first_visible(storage) == "bbbb"
    finally:
        page.close()
