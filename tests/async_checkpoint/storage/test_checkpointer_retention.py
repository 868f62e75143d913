"""Which checkpoints are kept, and the events of saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from async_checkpoint.checkpoints import NET, folder_of, left_over, restored, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.finite import is_finite
from outlast.errors import CheckpointError
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointCommitted, CheckpointFailed, CheckpointRemoved


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Retention(), [0, 1, 2, 3, 4, 5]),
        (Retention(last=2), [4, 5]),
        (Retention(last=1), [5]),
        (Retention(every=3), [0, 3, 5]),
        (Retention(best=2), [1, 2, 5]),
        (Retention(best=1, mode="min"), [3, 5]),
        (Retention(last=2, every=4, best=1), [0, 1, 4, 5]),
    ],
)
def test_what_stays(tmp_path: Path, keep: Retention, stay: list[int]) -> None:
    metrics = [0.1, 0.9, 0.8, 0.0, None, 0.5]
    sink = MemorySink()
    with Checkpointer(tmp_path, keep=keep, events=sink) as checkpointer:
        for step, metric in enumerate(metrics):
            checkpointer.save(step, state_of(step), metric=metric).wait(NET)
    assert valid_steps(tmp_path) == stay
    assert left_over(tmp_path) == []
    removed = [event.step for event in sink.events if isinstance(event, CheckpointRemoved)]
    assert sorted(removed) == [step for step in range(6) if step not in stay]


def test_nothing_is_removed_before_its_successor_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    with Checkpointer(tmp_path / "c", keep=Retention(last=1)) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        for op in ("write_at", "put", "publish"):
            plan.set({"op": op, "do": "EIO"})
            handle = checkpointer.save(2, state_of(2))
            with pytest.raises(CheckpointError, match="Input/output error"):
                handle.wait(NET)
            assert valid_steps(tmp_path / "c") == [1]
        plan.set()
        checkpointer.save(2, state_of(2)).wait(NET)
        checkpointer.save(3, state_of(3)).wait(NET)
    order = [(n["op"], n["folder"]) for n in plan.notes() if n["op"] in ("publish", "hide")]
    committed = [i for i, (op, folder) in enumerate(order) if op == "publish"]
    removed = [i for i, (op, folder) in enumerate(order) if folder == "step-00000001"]
    assert committed[1] < removed[0]
    assert valid_steps(tmp_path / "c") == [3]


@pytest.mark.parametrize(("op", "stay"), [("hide", [1, 2]), ("recycle", [2])])
def test_a_removal_that_fails_does_no_harm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    op: str,
    stay: list[int],
) -> None:
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    plan.set({"op": op, "do": "EACCES"})
    with Checkpointer(tmp_path / "c", keep=Retention(last=1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).wait(NET)
    assert "old checkpoints could not be removed" in caplog.text
    assert valid_steps(tmp_path / "c") == stay
    plan.set()
    with Checkpointer(tmp_path / "c"):
        pass
    assert left_over(tmp_path / "c") == []


def test_a_save_does_not_wait_for_a_removal_nor_is_removed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again while its previous checkpoint is being removed."""
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    plan.set({"op": "recycle", "do": "wait"})
    with Checkpointer(tmp_path / "c", keep=Retention(last=1, every=2)) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        checkpointer.save(2, state_of(2)).wait(NET)
        plan.gate().arrived()
        assert valid_steps(tmp_path / "c") == [2]
        checkpointer.save(1, state_of(1)).wait(NET)
        assert valid_steps(tmp_path / "c") == [1, 2]
        plan.set()
        plan.gate().open()
    assert valid_steps(tmp_path / "c") == [1, 2]
    assert left_over(tmp_path / "c") == []


def test_the_newest_by_step_is_not_always_the_last_that_was_saved(tmp_path: Path) -> None:
    """A training run that went back keeps its latest checkpoint."""
    with Checkpointer(tmp_path, keep=Retention(last=1)) as checkpointer:
        checkpointer.save(50, state_of(50)).wait(NET)
        checkpointer.save(7, state_of(7)).wait(NET)
    assert valid_steps(tmp_path) == [7, 50]
    assert restored(tmp_path) == 50


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Retention(last=2)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).wait(NET)
        (folder_of(tmp_path, 2) / "manifest.json").unlink()
        checkpointer.save(3, state_of(3)).wait(NET)
        assert [info.step for info in checkpointer.checkpoints()] == [1, 3]


def test_events_of_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(tmp_path / "plan").use(monkeypatch)
    monkeypatch.setenv("OUTLAST_EVENTS_DIR", str(tmp_path / "events"))
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        size = checkpointer.checkpoints()[0].size_bytes
        plan.set({"op": "write_at", "do": "ENOSPC"})
        failed = checkpointer.save(2, state_of(2))
        with pytest.raises(CheckpointError):
            failed.wait(NET)
    (file,) = (tmp_path / "events").iterdir()
    committed, failure = map(json.loads, file.read_text().splitlines())
    assert committed["step"] == 1
    assert committed["size_bytes"] == size
    assert 20_000 < committed["own_bytes"] < size
    assert 0 < committed["blocked_seconds"] <= committed["seconds"]
    assert committed["queued"] == 0
    assert failure["step"] == 2
    assert "No space left on device" in failure["cause"]
    assert {CheckpointCommitted.kind, CheckpointFailed.kind} == {committed["kind"], failure["kind"]}


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64"]
)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_is_found(dtype: str, wrong: float) -> None:
    values = torch.full((300, 300), 100.0).to(getattr(torch, dtype))  # the sum is not a half
    assert is_finite(values)
    values[-1, -1] = wrong
    assert not is_finite(values)


def test_finite_values_whose_sum_is_not() -> None:
    assert is_finite(torch.full((9,), torch.finfo(torch.float32).max))
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.tensor([1, 2]))


def test_the_newest_finite_checkpoint_outlives_those_after_a_flipped_bit(tmp_path: Path) -> None:
    values = torch.zeros(70_000)
    state = {"weight": values, "mask": torch.tensor([-torch.inf]), "step": 0}

    def save(*steps: int) -> list[int]:
        with Checkpointer(tmp_path, keep=2) as checkpointer:  # each time a new job
            for step in steps:
                checkpointer.save(step, state, finite={"weight", "of another rank"}).wait(NET)
        return valid_steps(tmp_path)

    assert save(0, 1, 2) == [1, 2]
    values[-1] = torch.nan
    assert save(3, 4, 5) == [2, 4, 5]
    assert save(6) == [2, 5, 6]
    with Checkpointer(tmp_path) as checkpointer:
        assert [info.finite for info in checkpointer.checkpoints()] == [True, False, False]
    values[-1] = 0.0
    assert save(7) == [6, 7]


def test_what_need_not_be_finite_is_not_judged(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"weight": torch.tensor([torch.nan])}).wait(NET)
        (info,) = checkpointer.checkpoints()
        assert info.finite is None
        checkpointer.save(2, {"weight": torch.tensor([0.0])}).wait(NET)
    assert valid_steps(tmp_path) == [2]
