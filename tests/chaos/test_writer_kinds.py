"""Faults of the writer process, the disk and the shared memory, with a real checkpointer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.in_memory import MemoryFired
from outlast import chaos
from outlast.async_checkpoint import Checkpointer
from outlast.chaos import fail_at
from outlast.chaos.injector import Injector
from outlast.errors import CheckpointError
from outlast.events.emitter import MemorySink, Sink
from outlast.events.types import CheckpointPassedOver, CheckpointRestored

SHAPE = (64, 256)  # 16 pages


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OUTLAST_EVENTS_DIR"):
        monkeypatch.delenv(name, raising=False)


def slow(*cases: Any) -> list[Any]:
    """Cases that only `pytest --all` runs."""
    marks = pytest.mark.slow
    return [
        pytest.param(*case, marks=marks)
        if isinstance(case, tuple)
        else pytest.param(case, marks=marks)
        for case in cases
    ]


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full(SHAPE, float(step))}


@contextmanager
def saves_under(
    folder: Path, kind: str, phase: str, seconds: float | None = None, sink: Sink | None = None
) -> Iterator[tuple[Checkpointer, Injector]]:
    """A checkpointer with one checkpoint, under a plan with this fault from step 2 on."""
    plan = [fail_at(0, step=2, kind=kind, phase=phase, seconds=seconds)]
    with (
        chaos.installed(Injector(plan, rank=0, fired=MemoryFired())) as injector,
        Checkpointer(folder, linger=0, events=sink or MemorySink()) as checkpointer,
    ):
        chaos.step(1)
        checkpointer.save(1, state(1)).result()
        chaos.step(2)
        yield checkpointer, injector


def restored(folder: Path) -> tuple[int | None, list[int]]:
    """The step that a new checkpointer restores, with the right content, and those passed over."""
    sink, found = MemorySink(), state(0)
    with Checkpointer(folder, events=sink) as checkpointer:
        step = checkpointer.restore(found)
    assert torch.equal(found["weights"], state(step or 0)["weights"])
    return step, [e.step for e in sink.events if isinstance(e, CheckpointPassedOver)]


@pytest.mark.parametrize("phase", [*slow("step", "committing"), "writing"])
def test_a_full_disk_fails_the_save_and_not_the_next(tmp_path: Path, phase: str) -> None:
    with saves_under(tmp_path, "disk_full", phase) as (checkpointer, injector):
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpointer.save(2, state(2)).result()
        assert [info.step for info in checkpointer.checkpoints()] == [1]
        checkpointer.save(3, state(3)).result()
        assert [record["phase"] for record in injector.fired.records()] == [phase]
    assert restored(tmp_path) == (3, [])


@pytest.mark.slow
def test_a_disk_is_full_for_some_time(tmp_path: Path) -> None:
    with saves_under(tmp_path, "disk_full", "writing", seconds=1e4) as (checkpointer, injector):
        for step in (2, 3):
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpointer.save(step, state(step)).result()
        assert injector.writers is not None
        injector.writers._full_until = 0.0
        checkpointer.save(4, state(4)).result()
    assert restored(tmp_path) == (4, [])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["writing", "committing"])
def test_a_slow_disk_delays_a_save(tmp_path: Path, phase: str) -> None:
    with saves_under(tmp_path, "slow_disk", phase, seconds=0.3) as (checkpointer, _):
        began = time.monotonic()
        checkpointer.save(2, state(2)).result()
        assert time.monotonic() - began >= 0.3
    assert restored(tmp_path) == (2, [])


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("torn_write", "writing"),
        ("flipped_byte", "committing"),
        *slow(
            *[
                (kind, phase)
                for kind in ("torn_write", "flipped_byte")
                for phase in ("step", "committed")
            ],
            ("flipped_byte", "writing"),
            ("torn_write", "committing"),
        ),
    ],
)
def test_silent_damage_is_passed_over(tmp_path: Path, kind: str, phase: str) -> None:
    with saves_under(tmp_path, kind, phase) as (checkpointer, injector):
        checkpointer.save(2, state(2)).result()
        (record,) = injector.fired.records()
        assert record["phase"] == phase
        with pytest.raises(CheckpointError):
            checkpointer.verify(2)
    assert restored(tmp_path) == (1, [2])


@pytest.mark.parametrize("phase", ["committing", *slow("step", "save", "writing", "committed")])
def test_a_killed_writer_is_replaced(tmp_path: Path, phase: str) -> None:
    with saves_under(tmp_path, "kill_writer", phase) as (checkpointer, injector):
        error = checkpointer.save(2, state(2)).exception()
        assert error is None or "the writer process" in str(error)
        assert len(injector.fired.records()) == 1
        visible = [info.step for info in checkpointer.checkpoints()]
        # Between two saves, it may or may not be noticed before the next save begins.
        committed = error is None if phase in ("step", "save") else phase == "committed"
        assert visible == ([1, 2] if committed else [1])
        checkpointer.save(3, state(3)).result()
    assert restored(tmp_path) == (3, [])


@pytest.mark.parametrize("phase", ["step", *slow("writing", "committing")])
def test_lost_memory_is_replaced_by_the_checkpoint(tmp_path: Path, phase: str) -> None:
    sink = MemorySink()
    with saves_under(tmp_path, "lost_shared_memory", phase, sink=sink) as (checkpointer, injector):
        if phase != "step":
            error = checkpointer.save(2, state(2)).exception()
            # In the middle of a write: an error of the kernel, or SIGBUS.
            assert error is None or "Bad address" in str(error) or "SIGBUS" in str(error)
        found = state(0)
        step = checkpointer.restore(found)
        assert step in (1, 2)
        assert torch.equal(found["weights"], state(step)["weights"])
        assert len(injector.fired.records()) == 1
        (event,) = [e for e in sink.events if isinstance(e, CheckpointRestored)]
        assert event.source == "storage"
        checkpointer.save(5, state(5)).result()
    assert restored(tmp_path) == (5, [])


def test_a_new_writer_is_not_given_lost_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saves_under(tmp_path, "kill_writer", "step") as (checkpointer, injector):
        chaos.fire("lost_shared_memory")
        assert injector.writers is not None
        while injector.writers.connected:
            time.sleep(0.001)
        assert checkpointer.restore(state(0)) == 1
    assert "snapshots in memory cannot be used" not in caplog.text
