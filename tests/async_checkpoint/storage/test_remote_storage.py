"""Object stores only: the order of a commit, abandoned uploads, owners."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from async_checkpoint.storage.manifests import empty
from async_checkpoint.storage.s3 import Server, call, keys, uploads
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.manifest import MANIFEST, encode
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.async_checkpoint.storage.remote_files import OrderedUpload, as_os_errors
from outlast.async_checkpoint.storage.remote_lock import OWNER
from outlast.async_checkpoint.writer.write_files import PIECE_BYTES, write_files
from outlast.errors import CheckpointError
from outlast.system.shared_memory import SharedMemory

PART = 5 << 20


@pytest.fixture
def storage(s3: Server) -> Iterator[RemoteStorage]:
    with closing(RemoteStorage(s3.new_url())) as storage:
        yield storage


@pytest.fixture
def memory() -> RemoteStorage:
    storage = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    storage.prepare()
    return storage


def manifest(step: int, save_id: str) -> bytes:
    return encode(empty(step, save_id))


def commit(storage: RemoteStorage, step: int, save_id: str) -> str:
    folder, same = storage.names_for(step, save_id)
    assert folder == same
    storage.make(folder)
    storage.put(folder, "data", save_id.encode())
    storage.put(folder, MANIFEST, manifest(step, save_id))
    storage.publish(folder, folder)
    return folder


def test_an_older_checkpoint_of_the_step_stays_until_the_next_commit(memory: RemoteStorage) -> None:
    # The names are in the opposite order of the commits.
    old, new = commit(memory, 42, "ff"), commit(memory, 42, "aa")
    assert memory.folders() == [old, new]
    assert folders.candidates(memory) == [(42, new), (42, old)]
    assert [info.folder for info in folders.list_checkpoints(memory)] == [new]
    assert folders.leftovers(memory) == [old]
    later = commit(memory, 43, "00")
    assert memory.folders() == [new, later]
    assert folders.leftovers(memory) == []


def test_a_commit_that_is_taken_back_leaves_the_older_one(memory: RemoteStorage) -> None:
    old, new = commit(memory, 42, "ff"), commit(memory, 42, "aa")
    memory.remove(new)  # the writer was killed before it could report the commit
    assert folders.candidates(memory) == [(42, old)]
    assert memory.get(old, "data") == b"ff"


def test_deleting_a_step_brings_no_older_one_to_light(memory: RemoteStorage) -> None:
    commit(memory, 42, "ff")
    commit(memory, 42, "aa")
    folders.delete(memory, 42)
    assert memory.folders() == []


def test_a_save_without_a_manifest_is_no_candidate_but_a_leftover(memory: RemoteStorage) -> None:
    folder, _ = memory.names_for(7, "aa")
    memory.make(folder)
    memory.put(folder, "data", b"data")
    assert folders.candidates(memory) == []
    assert folders.list_checkpoints(memory) == []
    assert folders.leftovers(memory) == [folder]
    assert [(f.step, f.wrong) for f in folders.survey(memory)] == [(None, "not committed")]


class Unreliable:
    """A file system whose named calls fail."""

    def __init__(self, fs: Any, *failing: str) -> None:
        self._fs = fs
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        if name in self.failing:
            raise ConnectionResetError(f"{name} failed")
        return getattr(self._fs, name)


def test_a_committed_save_is_not_called_failed_because_an_older_one_stays(
    memory: RemoteStorage,
) -> None:
    commit(memory, 1, "aa")
    commit(memory, 1, "bb")
    memory._fs = Unreliable(memory._fs, "rm", "rm_file")
    commit(memory, 2, "cc")
    assert [info.step for info in folders.list_checkpoints(memory)] == [1, 2]


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(memory: RemoteStorage) -> None:
    folder = commit(memory, 1, "aa")
    memory._fs = Unreliable(memory._fs, "rm")
    with pytest.raises(OSError, match="rm failed"):
        memory.remove(folder)
    assert folders.candidates(memory) == []
    assert folders.leftovers(memory) == [folder]


def test_files_that_the_store_keeps_are_an_error(memory: RemoteStorage) -> None:
    folder = commit(memory, 1, "aa")

    class Silent(Unreliable):
        def rm(self, *_: Any, **__: Any) -> None:
            pass

    memory._fs = Silent(memory._fs)
    with pytest.raises(OSError, match="1 files cannot be removed"):
        memory.remove(folder)


# ------------------------------------------------------------------------------------ uploads


def test_an_abandoned_upload_is_ended(storage: RemoteStorage) -> None:
    writer = storage.create("step-00000001-aa", "large", 3 * PART)
    writer.write_at(0, memoryview(bytes(PART)))
    assert uploads(storage.where) == ["step-00000001-aa/large"]
    writer.abandon()
    assert uploads(storage.where) == []
    assert keys(storage.where) == []


def test_a_file_with_a_missing_piece_never_appears(storage: RemoteStorage) -> None:
    writer = storage.create("step-00000001-aa", "large", 3 * PART)
    writer.write_at(0, memoryview(bytes(PART)))
    writer.write_at(2 * PART, memoryview(bytes(PART)))
    with pytest.raises(OSError, match=f"{2 * PART} of {3 * PART} bytes were sent"):
        writer.finish()
    assert uploads(storage.where) == []
    assert keys(storage.where) == []


def test_a_write_that_fails_ends_all_uploads_of_the_save(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(4 * PIECE_BYTES)
    real = storage._fs.call_s3

    def failing(method: str, **arguments: Any) -> Any:
        if method == "upload_part" and arguments["PartNumber"] == 2:
            raise ConnectionResetError("the line is cut")
        return real(method, **arguments)

    monkeypatch.setattr(storage._fs, "call_s3", failing)
    with pytest.raises(OSError, match="step-00000001-aa/one: the line is cut"):
        write_files(
            storage,
            "step-00000001-aa",
            memory.view,
            [("one", 0, 2 * PIECE_BYTES), ("two", 2 * PIECE_BYTES, 2 * PIECE_BYTES)],
            {},
            threads=2,
            dropped=threading.Event(),
        )
    memory.close()
    assert uploads(storage.where) == []
    assert keys(storage.where) == []


def test_what_a_killed_writer_has_begun_is_found_and_ended(storage: RemoteStorage) -> None:
    folder, _ = storage.names_for(5, "aa")
    storage.create(folder, "large", 3 * PART).write_at(0, memoryview(bytes(PART)))
    # It is not aborted, because its process is dead.
    assert folders.leftovers(storage) == [folder]
    assert folders.candidates(storage) == []
    storage.remove(folder)
    assert uploads(storage.where) == []
    assert storage.folders() == []


def test_no_more_parts_than_s3_takes(storage: RemoteStorage) -> None:
    writer = storage.create("step-00000001-aa", "large", 10_002 * 8)
    with pytest.raises(OSError, match="S3 takes 10000 parts, of 8 bytes here"):
        writer.write_at(10_000 * 8, memoryview(bytes(8)))
    writer.abandon()


def test_pieces_that_come_early_take_no_memory_and_no_thread(memory: RemoteStorage) -> None:
    data = os.urandom(8 * 1000)
    view = memoryview(data)
    memory.make("a")
    writer = memory.create("a", "file", len(data))
    assert isinstance(writer, OrderedUpload)
    for number in (3, 1, 7, 2, 6, 5, 4):
        writer.write_at(number * 1000, view[number * 1000 :][:1000])
    assert all(piece.obj is data for piece in writer._early.values())
    assert len(writer._early) == 7
    writer.write_at(0, view[:1000])
    assert not writer._early
    writer.finish()
    assert memory.get("a", "file") == data


# ------------------------------------------------------------------------------------- owners


def test_a_dead_owner_of_this_machine_is_followed_silently(
    memory: RemoteStorage, caplog: pytest.LogCaptureFixture
) -> None:
    memory.lock("the old one")
    said = json.loads(memory._fs.cat_file(f"{memory._root}/{OWNER}"))
    for change in ({"began": 1.0}, {"pid": 2**30}):
        memory._fs.pipe_file(f"{memory._root}/{OWNER}", json.dumps({**said, **change}).encode())
        memory.lock("the new one", careful=True)
        memory.unlock()
    assert caplog.records == []
    assert not memory._fs.exists(f"{memory._root}/{OWNER}")


@pytest.mark.parametrize("content", [b'{"owner": "the old one", "host": "elsewhere"}', b"{", b"[]"])
def test_an_owner_elsewhere_is_named_and_followed(
    memory: RemoteStorage, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    memory._fs.pipe_file(f"{memory._root}/{OWNER}", content)
    with pytest.raises(CheckpointError, match="as far as one can know from here"):
        memory.lock("the new one", careful=True)
    with caplog.at_level(logging.WARNING, "outlast.checkpoint"):
        memory.lock("the new one")
    (record,) = caplog.records
    assert ("the old one" in record.getMessage()) == (b"old" in content)
    memory.unlock()


def test_an_unlock_does_not_take_away_the_lock_of_a_successor(memory: RemoteStorage) -> None:
    memory.lock("the old one")
    memory._fs.pipe_file(f"{memory._root}/{OWNER}", b'{"owner": "the new one", "token": "1"}')
    memory.unlock()
    assert memory._fs.exists(f"{memory._root}/{OWNER}")


# ----------------------------------------------------------------------------- URLs and errors


def test_no_bucket(s3: Server) -> None:
    with (
        closing(RemoteStorage("s3://no-such-bucket/run")) as storage,
        pytest.raises(FileNotFoundError, match="there is no bucket 'no-such-bucket'"),
    ):
        storage.prepare()
    with pytest.raises(FileNotFoundError):
        call("head_bucket", Bucket="no-such-bucket")


def test_a_whole_bucket(s3: Server) -> None:
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    call("create_bucket", Bucket=bucket)
    with closing(RemoteStorage(f"s3://{bucket}/")) as storage:
        storage.prepare()
        assert storage.folders() == []
        folder = commit(storage, 3, "aa")
        storage.create("step-00000004-aa", "large", 3 * PART).write_at(0, memoryview(bytes(PART)))
        assert storage.folders() == [folder, "step-00000004-aa"]
        storage.remove("step-00000004-aa")
        storage.remove(folder)
        assert storage.folders() == []


def test_an_error_is_an_os_error_that_says_where() -> None:
    class OfSomeLibrary(Exception):
        pass

    for raised, kind, text in (
        (OfSomeLibrary("no credentials"), OSError, "s3://b/x: OfSomeLibrary: no credentials"),
        (FileNotFoundError("NoSuchKey"), FileNotFoundError, "s3://b/x: NoSuchKey"),
        (PermissionError(13, "Forbidden"), PermissionError, "s3://b/x: Forbidden"),
        (TimeoutError(), OSError, "s3://b/x: "),
        (OSError("s3://b/x is gone"), OSError, "s3://b/x is gone"),
    ):
        with pytest.raises(kind) as caught, as_os_errors("s3://b/x"):
            raise raised
        assert text in str(caught.value)


@pytest.mark.parametrize("url", ["memory://a/*", "memory://a[1]", "s3://b/?"])
def test_a_url_that_is_a_pattern_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="takes for patterns"):
        RemoteStorage(url)


def test_an_unknown_kind_of_url() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        RemoteStorage("nowhere://a")


def test_no_message_tells_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage("memory://me:secret@host/run")
    assert storage.where == "memory://***@host/run"


@pytest.mark.parametrize(
    ("missing", "url", "install"),
    [
        ("s3fs", "s3://b/run", "pip install 'outlast[s3]'"),
        ("fsspec", "s3://b/run", "pip install 'outlast[s3]'"),
        ("fsspec", "gs://b/run", "pip install 'outlast[remote]'"),
    ],
)
def test_what_is_missing_is_named(missing: str, url: str, install: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
from outlast.async_checkpoint.storage.directory import open_storage
try:
    open_storage({url!r})
except ModuleNotFoundError as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    assert install in done.stdout
    assert missing in done.stdout


def test_nothing_of_it_imports_torch(s3: Server) -> None:
    program = """
import sys
from outlast.async_checkpoint.writer import main
from outlast.async_checkpoint.storage.directory import open_storage
storage = open_storage(sys.argv[1])
storage.prepare()
storage.put("a", "b", b"c")
print(storage.folders(), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, s3.new_url()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "['a'] False"
