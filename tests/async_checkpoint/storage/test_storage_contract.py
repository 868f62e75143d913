"""The contract of every storage: a file system, S3, and fsspec's memory file system."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from async_checkpoint.storage.s3 import Server
from outlast.async_checkpoint.storage.directory import open_storage
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.async_checkpoint.storage.protocol import IDENTITY, Storage
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.async_checkpoint.writer.write_files import PIECE_BYTES, Dropped, write_files
from outlast.errors import CheckpointError, FolderInUse
from outlast.system.shared_memory import SharedMemory

PART = 5 << 20  # S3's minimum size of a part that is not the last


@pytest.fixture(params=["local", "s3", "memory", "file"])
def storage(request: pytest.FixtureRequest, s3: Server, tmp_path: Path) -> Iterator[Storage]:
    urls = {
        "s3": s3.new_url(),
        "memory": f"memory://{uuid.uuid4().hex}",
        "file": f"file://{tmp_path}/run",
    }
    url = urls.get(request.param)
    with closing(LocalStorage(str(tmp_path / "run")) if url is None else RemoteStorage(url)) as one:
        one.prepare()
        yield one


def content(size_bytes: int) -> bytes:
    return os.urandom(size_bytes)


def read(storage: Storage, folder: str, name: str) -> bytes:
    size = storage.size(folder, name)
    buffer = memoryview(bytearray(size + 10))
    reader = storage.open(folder, name)
    try:
        assert reader.read_into(0, buffer) == size
    finally:
        reader.close()
    return bytes(buffer[:size])


def test_what_was_put_is_there(storage: Storage) -> None:
    assert storage.folders() == []
    storage.make("a")
    storage.make("a")
    storage.put("a", "small", b"one")
    storage.put("a", "small", b"three")
    storage.sync("a")
    assert storage.folders() == ["a"]
    assert storage.get("a", "small") == b"three"
    assert storage.size("a", "small") == 5


def test_what_is_not_there_is_said_so(storage: Storage) -> None:
    storage.make("a")
    storage.put("a", "small", b"one")
    for folder in ("a", "b"):
        for ask in (storage.get, storage.size, storage.open):
            with pytest.raises(FileNotFoundError, match="nothing"):
                ask(folder, "nothing")
    storage.remove("b")


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [0, 10, PART, 3 * PART, 3 * PART + 10])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_pieces_in_any_order_from_any_thread(storage: Storage, size_bytes: int, order: str) -> None:
    data = content(size_bytes)
    storage.make("a")
    writer = storage.create("a", "large", size_bytes)
    starts = list(range(0, size_bytes, PART))
    if order == "backwards":
        starts.reverse()
    with ThreadPoolExecutor(1 if order == "backwards" else 3) as pool:
        list(pool.map(lambda at: writer.write_at(at, memoryview(data)[at : at + PART]), starts))
    writer.finish()
    assert read(storage, "a", "large") == data


def test_reading_in_ranges(storage: Storage) -> None:
    data = content(1000)
    storage.make("a")
    storage.put("a", "file", data)
    reader = storage.open("a", "file")
    buffer = memoryview(bytearray(100))
    assert reader.read_into(300, buffer) == 100
    assert buffer == data[300:400]
    assert reader.read_into(950, buffer) == 50
    assert buffer[:50] == data[950:]
    assert reader.read_into(1000, buffer) == 0
    assert reader.read_into(5000, buffer) == 0
    reader.close()


def test_a_save_with_all_that_belongs_to_it(storage: Storage) -> None:
    working, final = storage.names_for(42, "0123abcd")
    memory = SharedMemory(3 * PIECE_BYTES + 4096)
    memory.view[:] = content(len(memory.view))
    cut = 2 * PIECE_BYTES + 4096
    files = [("one", 0, cut), ("two", cut, len(memory.view) - cut)]
    told = write_files(
        storage, working, memory.view, files, {"s": b"small"}, threads=3, dropped=threading.Event()
    )
    storage.put(working, "manifest.json", b"{}")
    storage.sync(working)
    storage.publish(working, final)
    assert storage.folders() == [final]
    assert read(storage, final, "one") == memory.view[:cut]
    assert read(storage, final, "two") == memory.view[cut:]
    assert read(storage, final, "s") == b"small"
    assert told["s"] == {"size_bytes": 5, "checksums": [checksum(b"small")]}
    memory.close()


def test_a_save_that_is_dropped_can_be_removed(storage: Storage) -> None:
    memory = SharedMemory(3 * PIECE_BYTES)
    dropped = threading.Event()
    dropped.set()
    with pytest.raises(Dropped):
        write_files(
            storage, "a", memory.view, [("x", 0, len(memory.view))], {}, threads=2, dropped=dropped
        )
    memory.close()
    storage.remove("a")
    assert storage.folders() == []


def test_a_save_that_is_dropped_keeps_no_memory(storage: Storage) -> None:
    memory = SharedMemory(3 * PIECE_BYTES)
    dropped = threading.Event()
    dropped.set()
    gc.collect()
    gc.disable()  # keeps reference cycles alive
    try:
        with contextlib.suppress(Dropped):
            write_files(
                storage, "a", memory.view, [("x", 0, PIECE_BYTES)], {}, threads=2, dropped=dropped
            )
        memory.view.release()  # an error if the memory is still in use
    finally:
        gc.enable()
        memory.close()


def test_an_abandoned_file_can_be_removed(storage: Storage) -> None:
    storage.make("a")
    for whole in (False, True):
        writer = storage.create("a", "large", 2 * PART)
        writer.write_at(0, memoryview(bytes(2 * PART if whole else PART)))
        writer.abandon()
        writer.abandon()
        if not isinstance(storage, LocalStorage):
            with pytest.raises(FileNotFoundError):
                storage.size("a", "large")
    storage.remove("a")
    assert storage.folders() == []


def test_removed_is_that_folder_and_no_other(storage: Storage) -> None:
    folders = ["step-00000001-a", "step-00000001-ab", "step-00000010-a"]
    for folder in folders:
        storage.make(folder)
        storage.put(folder, "manifest.json", b"{}")
        storage.put(folder, "file", b"data")
    storage.remove(folders[0])
    storage.remove(folders[0])
    assert storage.folders() == folders[1:]
    assert storage.get(folders[1], "file") == b"data"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc"])
def test_names_that_lead_elsewhere_are_refused(storage: Storage, name: str) -> None:
    for ask in (
        lambda: storage.get("a", name),
        lambda: storage.get(name, "a"),
        lambda: storage.put("a", name, b""),
        lambda: storage.size("a", name),
        lambda: storage.open("a", name),
        lambda: storage.make(name),
        lambda: storage.remove(name),
        lambda: storage.create("a", name, 10),
    ):
        with pytest.raises(CheckpointError, match="is not a valid file name"):
            ask()


LOCKER = """
import sys
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.errors import CheckpointError, FolderInUse
storage = (LocalStorage if sys.argv[1] == "local" else RemoteStorage)(sys.argv[2])
try:
    storage.lock("the other")
    print("locked", flush=True)
except CheckpointError as e:
    print(e, flush=True)
    sys.exit()
sys.stdin.read()
assert "torch" not in sys.modules
"""


def other_job(storage: Storage) -> subprocess.Popen[str]:
    kind = "local" if isinstance(storage, LocalStorage) else "remote"
    command = [sys.executable, "-c", LOCKER, kind, storage.where]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_jobs_cannot_have_it(storage: Storage) -> None:
    if storage.where.startswith("memory:"):
        pytest.skip("of one process only")
    storage.lock("this one")
    said, _ = other_job(storage).communicate()
    assert "in use by another job (this one)" in said
    storage.unlock()
    with other_job(storage) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=r"in use by another job \(the other\)"):
            storage.lock("this one")
        other.kill()
    # It did not unlock, but it is dead.
    storage.lock("this one", careful=True)
    storage.unlock()


def test_a_place_is_known_again_until_it_is_emptied(storage: Storage) -> None:
    before = storage.identity()
    assert before
    assert storage.identity() == before
    assert storage.folders() == []
    if isinstance(storage, LocalStorage):
        (storage.root / IDENTITY).unlink()
    else:
        assert isinstance(storage, RemoteStorage)
        storage._fs.rm_file(f"{storage._root}/{IDENTITY}")
    assert storage.identity() not in ("", before)


def test_a_url_or_a_path() -> None:
    assert isinstance(open_storage("here"), LocalStorage)
    assert open_storage("file:///tmp/here").where == "/tmp/here"
    assert isinstance(open_storage("memory://here"), RemoteStorage)
