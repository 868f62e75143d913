"""The small files beside the checkpoints are durable, and their damage is noticed."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from async_checkpoint import staged_writer
from async_checkpoint.checkpoints import NET, save_steps, state_of
from async_checkpoint.failing_calls import FailingCalls
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.storage.fence import raise_fence
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.protocol import IDENTITY, Position, Storage
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.async_checkpoint.trust import limit_trust, trusted
from outlast.errors import CheckpointError
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_writer, "_synced", {})
    monkeypatch.setattr(os, "fsync", staged_writer._fsync)


def not_durable(*paths: Path) -> list[str]:
    """The files and folders that a power failure would lose, or their names."""
    found = []
    for path in paths:
        found += [path.name] if staged_writer._missing(path, deep=False) else []
    return found


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"0123", b"g" * 32])
def test_a_damaged_identity_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, content: bytes
) -> None:
    storage: Storage
    if kind == "local":
        storage = LocalStorage(str(tmp_path / "c"))
        storage.prepare()
        (tmp_path / "c" / IDENTITY).write_bytes(content)
    else:
        storage = remote = RemoteStorage(f"memory://{uuid.uuid4().hex}")
        remote.prepare()
        remote._fs.pipe_file(f"{remote._root}/{IDENTITY}", content)
    with caplog.at_level(logging.WARNING, "outlast.checkpoint"):
        found = storage.identity()
    assert "is damaged: it gets a new id" in caplog.text
    assert len(found) == 32
    assert storage.identity() == found


def test_a_job_goes_on_with_a_damaged_identity(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / IDENTITY).write_bytes(b"\xff\xfe\x00")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0)) == 1
        checkpointer.save(2, state_of(2)).wait(NET)


@pytest.mark.usefixtures("synced")
def test_the_identity_is_durable(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "a" / "c"))
    storage.prepare()
    storage.identity()
    paths = (tmp_path, tmp_path / "a", storage.root, storage.root / IDENTITY)
    assert not_durable(*paths) == []


@pytest.mark.usefixtures("synced")
def test_a_fence_is_durable(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "c"))
    storage.prepare()
    storage.make(storage.names_for(3, "aaaa")[0])
    page = LeasePage.create(tmp_path)
    page.renew(lease_page.now() + 1000.0)
    try:
        raise_fence(storage, Position("run", (0, 0, 0), str(page.path)))
    finally:
        page.close()
    (fence,) = storage.root.glob(".fence-*")
    assert not_durable(storage.root, fence, *fence.iterdir()) == []
    assert {path.name for path in fence.iterdir()} == {"fence.json", "refused.json"}


@pytest.mark.usefixtures("synced")
def test_a_limit_of_trust_is_durable(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        limit_trust(checkpointer, 3, "a test")
        trust = tmp_path / "trust"
        assert not_durable(tmp_path, trust, trust / "limit.json") == []


@pytest.mark.parametrize("content", [b'{"step": 1e999}', b"[" * 100_000, b'{"step": []}', b"[]"])
def test_a_forged_limit_of_trust_is_named(tmp_path: Path, content: bytes) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        limit_trust(checkpointer, 3, "a test")
        (tmp_path / "trust" / "limit.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"limit\.json, which limits .* cannot be read"):
            trusted(checkpointer)


LIMIT = """
import sys
from outlast.async_checkpoint.storage.local import LocalStorage
LocalStorage(sys.argv[1]).put_record("trust", "limit.json", sys.argv[2].encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after"])
def test_a_record_is_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.put_record("trust", "limit.json", b"old")
    calls = FailingCalls(tmp_path, monkeypatch)
    contents = []
    for number in range(1, 10):
        calls.set("any", how=how, first=number)
        command = [sys.executable, "-c", LIMIT, str(tmp_path), "new"]
        code = subprocess.run(command, check=False).returncode
        contents.append(storage.get("trust", "limit.json"))
        if code == 0:
            break
        assert code == -9
    assert code == 0
    assert number == 5  # three files and folders made durable, and one rename
    assert set(contents) == {b"old", b"new"}


def test_a_lock_whose_close_reports_an_error_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.prepare()
    storage.lock("first")
    close = os.close

    def fails(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        storage.unlock()
    storage.unlock()  # the number may be another file's by now
    storage.lock("second")
    storage.close()
