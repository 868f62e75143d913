"""Regression tests: wrong bytes that a restore must never accept."""

from __future__ import annotations

import datetime
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.save.save import Save
from outlast.async_checkpoint.snapshot.buffers import BufferPool
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.coordination.call_ledger import Round
from outlast.errors import CheckpointError, StoreError
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointCommitted, CheckpointFailed

NET = datetime.timedelta(seconds=60)
LARGE = 3 << 20  # elements: several chunks


def full(value: float, size: int = 100) -> torch.Tensor:
    return torch.full((size,), value)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def data_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}" / "__0_0.distcp"


def test_a_refused_save_copies_nothing_more_and_is_not_sealed_by_a_step(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    with Checkpointer(tmp_path, overlap=optimizer) as checkpointer:
        state: dict[str, Any] = {"p": parameter.detach(), "bn": torch.empty(4, device="meta")}
        with pytest.raises(CheckpointError, match="'bn' is a meta tensor"):
            checkpointer.save(7, state)
        assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert checkpointer.restore({"p": torch.zeros(1000), "bn": torch.zeros(4)}) is None


def test_what_is_optional_keeps_no_byte_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"w": full(1.0)}}).wait(NET)
        both = {"model": {"w": full(2.0)}, "ema": {"w": full(2.0, LARGE)}}
        checkpointer.save(2, both).wait(NET)
    flip(data_file(tmp_path, 2), 6 << 20)
    with Checkpointer(tmp_path) as checkpointer:
        state = {"model": {"w": full(0.0)}, "ema": {"w": full(0.0, LARGE)}}
        with pytest.raises(CheckpointError, match=r"ema\.w.* parts of a damaged one"):
            checkpointer.restore(state, optional=["ema."])


def test_an_empty_dict_is_filled_by_what_is_restored_and_by_nothing_else(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": full(1.0), "optimizer": {"state": {}}}).wait(NET)
        later = {"w": full(2.0, LARGE), "optimizer": {"state": {0: full(2.0)}}}
        checkpointer.save(2, {**later, "w": full(2.0)}).wait(NET)
    flip(data_file(tmp_path, 2), 800)
    with Checkpointer(tmp_path) as checkpointer:
        state: dict[str, Any] = {"w": full(0.0), "optimizer": {"state": {}}}
        assert checkpointer.restore(state) == 1
        assert state["optimizer"] == {"state": {}}
        assert torch.equal(state["w"], full(1.0))


def test_a_thread_of_an_aborted_checkpointer_does_not_free_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go, done = threading.Event(), threading.Event(), threading.Event()
    give_back, write = BufferPool.give_back, Save.write
    writing, written = threading.Event(), threading.Event()

    def late(pool: BufferPool, *args: Any) -> None:
        if threading.current_thread().name == "outlast-saver" and not held.is_set():
            held.set()
            go.wait()
            give_back(pool, *args)
            done.set()
        else:
            give_back(pool, *args)

    def slow(save: Save) -> Any:
        if save.step == 2:
            writing.set()
            written.wait()
        return write(save)

    monkeypatch.setattr(BufferPool, "give_back", late)
    monkeypatch.setattr(Save, "write", slow)
    first = Checkpointer(tmp_path)
    first.save(1, {"w": full(1.0)})
    held.wait()
    first.abort()
    with Checkpointer(tmp_path) as second:
        handle = second.save(2, {"w": full(2.0)})
        writing.wait()
        go.set()
        done.wait()
        third = threading.Thread(target=lambda: second.save(3, {"w": full(3.0)}))
        third.start()  # it waits for the only buffer
        written.set()
        handle.wait(NET)
        third.join()
        second.wait(NET)
    with Checkpointer(tmp_path) as checkpointer:
        state = {"w": full(0.0)}
        assert checkpointer.restore(state, step=2) == 2
        assert torch.equal(state["w"], full(2.0))


def test_a_checkpoint_is_described_by_its_own_structure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save changes the structure before the save thread has read this one."""
    walk, go = Save.complete, threading.Event()

    def late(save: Save) -> Any:
        if save.step == 2:
            go.wait()
        return walk(save)

    monkeypatch.setattr(Save, "complete", late)
    with Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        checkpointer.save(1, {"a": full(1.0), "b": full(10.0)}).wait(NET)
        checkpointer.save(2, {"a": full(2.0), "b": full(20.0)})
        checkpointer.save(3, {"b": full(30.0), "a": full(3.0)})
        go.set()
        checkpointer.wait(NET)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (2, 3):
            state = {"a": full(0.0), "b": full(0.0)}
            assert checkpointer.restore(state, step=step) == step
            assert (state["a"][0], state["b"][0]) == (step, 10 * step)


def test_a_failed_allocation_is_over_with_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.async_checkpoint.snapshot import buffers as module

    memory, fails = module.SharedMemory, [True]

    def scarce(*args: Any) -> Any:
        if fails and fails.pop():
            raise MemoryError("no room")
        return memory(*args)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": full(1.0)}).wait(NET)
        monkeypatch.setattr(module, "SharedMemory", scarce)
        with pytest.raises(MemoryError):
            checkpointer.save(2, {"w": full(2.0, LARGE)})
        checkpointer.save(3, {"w": full(3.0, LARGE)}).wait(NET)
        checkpointer.verify(3)


def test_a_snapshot_belongs_to_the_folder_and_not_to_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Checkpointer(folder)
    first.save(5, {"w": full(5.0)}).wait(NET)
    first.abort()
    session = first.session
    shutil.rmtree(folder)
    session.storage.unlock()
    session.locked = False
    with Checkpointer(folder) as second:
        assert second.restore({"w": full(0.0)}) is None


def test_what_was_deleted_is_not_in_memory_either(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": full(1.0)}).wait(NET)
        checkpointer.save(2, {"w": full(float("nan"))}).wait(NET)
        checkpointer.delete(2)
        state = {"w": full(0.0)}
        assert checkpointer.restore(state) == 1
        assert torch.equal(state["w"], full(1.0))


def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_what_it_leads_to_stays(
    tmp_path: Path,
) -> None:
    folder, archive = tmp_path / "run", tmp_path / "archive"
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"w": full(1.0)}).wait(NET)
    os.rename(folder / "step-00000001", archive)
    os.symlink(archive, folder / "step-00000001")
    LocalStorage(str(folder)).remove("step-00000001")
    assert (archive / "manifest.json").exists()
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.checkpoints() == []


def test_a_replacement_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    """On file systems without an atomic exchange: the job died before the last rename."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"w": full(4.0)}).wait(NET)
    os.rename(tmp_path / "step-00000004", tmp_path / "step-00000004-new")
    with Checkpointer(tmp_path) as checkpointer:
        state = {"w": full(0.0)}
        assert checkpointer.restore(state) == 4


def test_a_home_folder_is_meant_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, {"w": full(1.0)}).wait(NET)
    assert (tmp_path / "run" / "step-00000001").is_dir()


def test_several_ranks_need_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        Checkpointer(tmp_path)


def test_checkpointers_that_follow_each_other_hold_one_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_EVENTS_DIR", str(tmp_path / "events"))
    checkpointer = Checkpointer(tmp_path / "run")
    held = len(os.listdir("/proc/self/fd"))
    for step in range(5):
        checkpointer.save(step, {"w": full(step)}).wait(NET)
        checkpointer.abort()
        checkpointer = Checkpointer(tmp_path / "run")
        held = max(held, len(os.listdir("/proc/self/fd"))) if step == 0 else held
    assert len(os.listdir("/proc/self/fd")) <= held
    checkpointer.close()
    (log,) = (tmp_path / "events").iterdir()
    assert log.read_text().count('"checkpoint_committed"') == 5


def test_what_is_committed_when_the_store_goes_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise StoreError("the store at localhost:29500 cannot be reached: Broken pipe")

    sink = MemorySink()
    keep = Retention(last=1)
    with Checkpointer(tmp_path, keep=keep, events=sink) as checkpointer:
        checkpointer.save(1, {"w": full(1.0)}).wait(NET)
        with monkeypatch.context() as patch:
            patch.setattr(Round, "conclude", gone)
            checkpointer.save(2, {"w": full(2.0)}).wait(NET)
        committed = [event.step for event in sink.events if isinstance(event, CheckpointCommitted)]
        assert committed == [1, 2]
        assert not any(isinstance(event, CheckpointFailed) for event in sink.events)
        # Another checkpointer may own the folder by now: nothing is removed from it.
        assert [info.step for info in checkpointer.checkpoints()] == [1, 2]
        checkpointer.save(3, {"w": full(3.0)}).wait(NET)
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints()] == [3]
