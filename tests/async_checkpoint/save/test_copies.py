"""The snapshot copy: with checksums, in threads that can be stopped."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from async_checkpoint.checkpoints import NET, same
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.save.saves import Saves
from outlast.async_checkpoint.snapshot import chunk_copy as chunks_module
from outlast.async_checkpoint.snapshot.buffers import BufferPool
from outlast.async_checkpoint.snapshot.chunk_copy import ChunkCache, Chunks, EagerCopy, cut
from outlast.async_checkpoint.snapshot.plan import describe
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.errors import CheckpointError
from outlast.system import shared_memory
from outlast.system.shared_memory import PAGE_BYTES, SharedMemory, move

LARGE = 3 << 20  # elements: several chunks


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(3 * CHUNK_BYTES + 8192)
    memory.view[:] = random.Random(1).randbytes(len(memory.view))
    yield memory
    memory.close()


def laid_out(memory: SharedMemory, seed: int) -> tuple[Any, list[Any], bytes]:
    """Two files, tensors at random offsets in them, and the expected bytes."""
    chance = random.Random(seed)
    cut = 2 * CHUNK_BYTES + 4096
    files = [("one", 0, cut), ("two", cut, len(memory.view) - cut)]
    expected = bytearray(memory.view)
    whole = torch.frombuffer(memory.view, dtype=torch.uint8)
    copies: list[Any] = []
    at = chance.randrange(300)
    while True:
        size = chance.choice([1, 7, 64, 5000, 300_000, 900_000, CHUNK_BYTES + 1])
        if at + size > len(memory.view):
            return files, copies, bytes(expected)
        if not at < cut < at + size:  # a tensor is never cut
            source = torch.frombuffer(bytearray(chance.randbytes(size)), dtype=torch.uint8)
            copies.append((source, whole[at : at + size]))
            expected[at : at + size] = source.numpy().tobytes()
        at += size + chance.choice([0, 0, 1, 200])


def chunks_of(
    cache: ChunkCache, memory: SharedMemory, files: Any, copies: list[Any], hashed: bool
) -> Chunks:
    places = [(to.data_ptr() - memory.address, to.nbytes) for _, to in copies]
    return cache.chunks(memory, files, places, [source.data_ptr() for source, _ in copies], hashed)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_are_copied_and_their_checksums_taken(memory: SharedMemory, seed: int) -> None:
    files, copies, expected = laid_out(memory, seed)
    cache = ChunkCache()
    for hashed in (True, False, True, True):
        for _, to in copies:
            to.zero_()
        filled = chunks_of(cache, memory, files, copies, hashed)
        EagerCopy(copies, filled).run()
        assert bytes(memory.view) == expected
        if hashed:
            assert filled.checksums() == checksums_of(
                (n, memory.view[at : at + size]) for n, at, size in files
            )


def test_copies_that_are_not_in_order_are_refused(memory: SharedMemory) -> None:
    files, copies, _ = laid_out(memory, 0)
    with pytest.raises(ValueError, match="order"):
        chunks_of(ChunkCache(), memory, files, [*copies[1:], copies[0]], True)


def test_tensors_at_other_addresses_next_time(memory: SharedMemory) -> None:
    files, copies, expected = laid_out(memory, 0)
    cache = ChunkCache()
    EagerCopy(copies, chunks_of(cache, memory, files, copies, True)).run()
    for change in range(1, 3):
        copies = [((source + change).clone(), to) for source, to in copies]
        if change == 2:
            del copies[3:6]  # what was there stays
        before = bytearray(memory.view)
        filled = chunks_of(cache, memory, files, copies, True)
        EagerCopy(copies, filled).run()
        assert bytes(memory.view) != expected
        assert bytes(memory.view) != before
        assert all(torch.equal(source, to) for source, to in copies)
        assert filled.checksums() == checksums_of(
            (n, memory.view[at : at + size]) for n, at, size in files
        )


@pytest.mark.slow
@pytest.mark.parametrize("order", ["aeb", "eab", "abe", "eee"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_without_elements(tmp_path: Path, order: str, overlap: bool) -> None:
    """Empty tensors have no address; an empty shard of a DTensor is an example."""
    parameters = [
        torch.nn.Parameter(torch.zeros(0, 4) if letter == "e" else torch.randn(300_000))
        for letter in order
    ]
    optimizer = torch.optim.SGD(parameters, 0.1)
    state = {str(i): p.detach() for i, p in enumerate(parameters)}
    state["not of an optimizer"] = torch.zeros(0)
    with Checkpointer(tmp_path, overlap=[optimizer] if overlap else []) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(1.0)
            checkpointer.save(step, state).wait(NET)
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            assert checkpointer.restore(found) == step
            assert same(found, state)
    with Checkpointer(tmp_path) as checkpointer:
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpointer.restore(found) == 2
        assert same(found, state)


def test_an_error_of_a_helper_is_raised(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    source = torch.ones(len(memory.view), dtype=torch.uint8)
    chunks = cut([("file", 0, source.nbytes)], [(0, source.nbytes)], all_of_them=False)
    helped = threading.Event()

    class Failing(Chunks):
        def fill(self, number: int, *args: Any) -> int:
            if threading.current_thread().name == "outlast-copy":
                helped.set()
                raise MemoryError("no room")
            assert helped.wait(60)
            return super().fill(number, *args)

    with pytest.raises(MemoryError, match="no room"):
        EagerCopy([], Failing(memory, chunks, [source.data_ptr()], None)).run()


def test_an_interrupted_copy_is_called_off_with_its_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that kept copying would write into the buffer of the next save."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    helping, go = threading.Event(), threading.Event()
    ended: list[bool] = []
    real = Chunks.fill

    def fill(self: Chunks, number: int, called_off: Any = lambda: False) -> int:
        if threading.current_thread().name == "outlast-copy":
            helping.set()
            assert go.wait(60)
            assert called_off()
            ended.append(True)
            return real(self, number, called_off)
        assert helping.wait(60)
        raise KeyboardInterrupt

    call_off = EagerCopy.call_off

    def calling_off(copy: EagerCopy) -> None:
        copy._called_off = True
        go.set()
        call_off(copy)

    state = {"w": torch.ones(LARGE)}
    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Chunks, "fill", fill)
            patch.setattr(EagerCopy, "call_off", calling_off)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state)
            assert ended == [True]
        checkpointer.save(2, state).wait(NET)
        assert checkpointer.restore({"w": torch.zeros(LARGE)}) == 2


def test_a_write_by_another_thread_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(LARGE)}
    real = Chunks.fill

    def fill(self: Chunks, number: int, *args: Any) -> int:
        upto = real(self, number, *args)
        if number == 1:
            writing = threading.Thread(target=lambda: state["w"].add_(1))
            writing.start()
            writing.join()
        return upto

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Chunks, "fill", fill)
            handle = checkpointer.save(1, state)
        with pytest.raises(CheckpointError, match="by another thread"):
            handle.wait(NET)
        assert checkpointer.checkpoints() == []


class Told:
    """Records for each save whether its copy computed the checksums."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed: list[bool] = []
        add = Saves._enqueue

        def noted(saves: Saves, save: Any) -> None:
            self.hashed.append(save.taken.hashed)
            add(saves, save)

        monkeypatch.setattr(Saves, "_enqueue", noted)


def test_a_write_that_torch_does_not_count_fails_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the copy of a byte and its checksum."""
    told = Told(monkeypatch)
    parameter = torch.nn.Parameter(torch.ones(LARGE))
    state = {"w": parameter.detach()}
    raw = state["w"].numpy()
    with Checkpointer(tmp_path, overlap=torch.optim.SGD([parameter], 0.1)) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        with monkeypatch.context() as patch:

            def moved(to: int, source: int, size_bytes: int) -> None:
                move(to, source, size_bytes)
                raw[0] = 7.0

            patch.setattr(chunks_module, "move", moved)
            checkpointer.save(2, state).wait(NET)
        assert told.hashed == [True, True]
        for _ in range(2):  # from memory, and what is then left: from disk
            found = {"w": torch.zeros(LARGE)}
            assert checkpointer.restore(found) == 1
            assert torch.equal(found["w"], torch.ones(LARGE))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shared", "eager", "eager, strided"])
def test_the_writer_hashes_what_the_copy_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    told = Told(monkeypatch)
    parameter = torch.nn.Parameter(torch.randn(LARGE // 1024, 1024))
    optimizer = torch.optim.SGD([parameter], 0.1)
    state = {"w": parameter.detach()}
    if what == "shared":
        parameter.share_memory_()
        state = {"w": parameter.detach()}
    if what == "eager, strided":
        state = {"w": parameter.detach().t()}
    with Checkpointer(tmp_path, overlap=[optimizer] if what == "shared" else []) as checkpointer:
        checkpointer.save(1, {"fine": torch.ones(LARGE)}).wait(NET)
        checkpointer.save(2, state)
        checkpointer.wait(NET)
        assert told.hashed == [False, False]
        found = {"w": torch.zeros_like(state["w"])}
        assert checkpointer.restore(found) == 2
        assert same(found, state)
        assert checkpointer.verify(2).step == 2
    with Checkpointer(tmp_path) as checkpointer:
        found = {"w": torch.zeros_like(state["w"])}
        assert checkpointer.restore(found) == 2
        assert same(found, state)


def test_the_first_copy_allocates_the_memory_chunk_by_chunk() -> None:
    """Only what it is about to fill, whose bytes are then in the cache; later ones, nothing."""
    memory = SharedMemory(2 * CHUNK_BYTES)

    def allocated() -> int:
        return os.fstat(memory.descriptor).st_blocks * 512

    whole = torch.frombuffer(memory.view, dtype=torch.uint8)
    copies = [(torch.ones(5, dtype=torch.uint8), whole[10:15])]
    copies.append((torch.ones(5, dtype=torch.uint8), whole[CHUNK_BYTES + 7 : CHUNK_BYTES + 12]))
    cache, files = ChunkCache(), [("one", 0, 2 * CHUNK_BYTES)]
    filled = chunks_of(cache, memory, files, copies, False)
    assert allocated() == 0
    filled.fill(0)
    assert allocated() == CHUNK_BYTES
    memory.is_populated = True
    chunks_of(cache, memory, files, copies, False).fill(1)
    assert allocated() == CHUNK_BYTES + PAGE_BYTES
    del whole, copies
    memory.close()


def test_a_buffer_is_allocated_by_its_first_save(tmp_path: Path) -> None:
    state = {"large": torch.randn(LARGE)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        (buffer,) = checkpointer.session.pool.buffers
        assert buffer.memory is not None
        assert buffer.memory.is_populated
        allocated = os.fstat(buffer.memory.descriptor).st_blocks * 512
        assert allocated == buffer.memory.size_bytes


class _Writer:
    def start(self) -> None:
        pass

    def tell(self, *_: Any, **__: Any) -> None:
        pass


@pytest.fixture
def preallocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BufferPool, list[int]]]:
    """A pool that allocates a buffer of a GiB in the background, slowly, and the sizes so far."""
    sizes: list[int] = []
    begun = threading.Event()

    def allocate(_: int, size_bytes: int) -> None:
        sizes.append(size_bytes)
        begun.set()
        time.sleep(0.01)

    monkeypatch.setattr(shared_memory, "allocate", allocate)
    items = describe({"large": torch.empty(1 << 28)})
    pool = BufferPool(cast(Any, _Writer()))
    pool.grow(1)
    pool.preallocate(Structure(items, [item.key for item in items], 0))
    assert begun.wait(60)
    yield pool, sizes
    pool.end_copies()
    pool.close()


def test_memory_is_allocated_a_little_at_a_time(
    preallocated: tuple[BufferPool, list[int]],
) -> None:
    """A thread that allocates a tensor meanwhile waits for the kernel's call."""
    pool, sizes = preallocated
    pool.end_copies()
    assert max(sizes) <= 1 << 20


def test_a_restart_ends_the_allocation_in_the_background(
    preallocated: tuple[BufferPool, list[int]],
) -> None:
    pool, sizes = preallocated
    pool.give_back_all()
    assert sum(sizes) < 1 << 30
    (buffer,) = pool.buffers
    assert buffer.memory is not None
    assert buffer.usable
    assert not buffer.memory.is_populated  # so the first copy allocates what is left


def test_the_next_restore_continues_an_allocation_that_a_restart_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save costs no more than later ones, also after a fault in the first seconds."""
    allocate = shared_memory.allocate

    def slowly(address: int, size_bytes: int) -> None:
        time.sleep(0.02)
        allocate(address, size_bytes)

    state = {"large": torch.zeros(1 << 24)}
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "allocate", slowly)
        first = Checkpointer(tmp_path)
        first.restore(state)
        first.abort()
    with Checkpointer(tmp_path) as checkpointer:
        (buffer,) = checkpointer.session.pool.buffers
        assert buffer.memory is None or not buffer.memory.is_populated
        checkpointer.restore(state)
        assert checkpointer.session.pool._allocating is not None
        checkpointer.session.pool._allocating.join(60)
        assert buffer.memory is not None
        assert buffer.memory.is_populated
