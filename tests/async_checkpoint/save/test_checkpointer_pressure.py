"""C5: memory in flight is bounded: saves wait instead of allocating more."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from async_checkpoint.checkpoints import NET, restored, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from inprocess.mutations import mutate
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.snapshot.buffers import BufferPool


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


@contextmanager
def opened_when_blocked(plan: Plan) -> Iterator[None]:
    """Releases the writer once this thread waits for a buffer, or has left the block."""
    main, left = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not left.is_set():
            frame = sys._current_frames()[main]
            names = set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            if {"take", "wait_for", "wait"} <= names:
                break
            time.sleep(0.001)  # no event says that another thread has begun to wait
        plan.set()
        gate.open()

    gate = plan.gate()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


def check_pressure(path: Path, plan: Plan, max_in_flight: int) -> None:
    """The disk is blocked: one save more than `max_in_flight` waits for the first to end."""
    with Checkpointer(path, max_in_flight=max_in_flight) as checkpointer:
        plan.set({"op": "publish", "do": "wait"})
        gate = plan.gate()
        handles = [checkpointer.save(step, state_of(step)) for step in range(max_in_flight)]
        gate.arrived()
        assert not any(handle.done() for handle in handles)
        with opened_when_blocked(plan):
            last: SaveHandle = checkpointer.save(9, state_of(9))
            done = handles[0].done()
        last.wait(NET)
        assert done
        assert len(checkpointer.session.pool.buffers) == max_in_flight
    assert restored(path) == 9


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_save_waits_for_a_free_buffer(tmp_path: Path, plan: Plan, max_in_flight: int) -> None:
    check_pressure(tmp_path / "c", plan, max_in_flight)


def test_the_check_finds_a_save_that_does_not_wait(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(
        monkeypatch,
        BufferPool.take,
        "self._freed.wait_for(self._has_free, timeout_s)",
        "(self.grow(len(self.buffers) + (not self._has_free())) or True)",
    )
    with pytest.raises(AssertionError):
        check_pressure(tmp_path / "c", plan, 1)


def test_memory_is_flat_over_many_saves(tmp_path: Path) -> None:
    own = psutil.Process()
    state = state_of(1, 1_000_000)
    held = {}
    with Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        for count in range(60):
            state["steps"] = count
            checkpointer.save(count % 3, state)
            if count in (10, 59):
                checkpointer.wait(NET)
                writer = psutil.Process(checkpointer.session.writer.pid)
                held[count] = (
                    own.num_fds(),
                    own.num_threads(),
                    # It may still be removing what the last save has replaced.
                    writer.num_fds() // 20,
                    len(own.children()),
                    sum(
                        buffer.memory.size_bytes
                        for buffer in checkpointer.session.pool.buffers
                        if buffer.memory
                    ),
                )
                memory = [p.memory_info().rss for p in (own, writer)]
                held[-count] = tuple(memory)
    assert held[10] == held[59]
    for before, after in zip(held[-10], held[-59], strict=True):
        assert after < before + (4 << 20), held  # the size of a buffer


def test_a_smaller_state_gives_memory_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step, elements in enumerate((1000, 2_000_000, 1000)):
            checkpointer.save(step, state_of(step, elements)).wait(NET)
            memory = checkpointer.session.pool.buffers[0].memory
            assert memory is not None
            assert elements * 4 <= memory.size_bytes <= elements * 8 + (2 << 20)
    assert valid_steps(tmp_path) == [0, 1, 2]
