"""Saving in one process: the handle, invalid arguments, errors, closing."""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_checkpoint.checkpoints import (
    NET,
    blank,
    folder_of,
    left_over,
    restored,
    save_steps,
    state_of,
    valid_steps,
)
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer, FailurePolicy, Retention
from outlast.errors import CheckpointError, CheckpointUnsavable, RestartError, SaveCancelled

AT_ONCE = datetime.timedelta()
BEFORE_THE_END = {"op": "publish", "do": "wait"}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


def test_what_was_saved_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with Checkpointer(path) as checkpointer:
        assert checkpointer.restore({}) is None
        assert checkpointer.checkpoints() == []
    save_steps(path, 1, 20)
    assert restored(path) == 20
    assert restored(path, step=1) == 1
    with Checkpointer(path) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints()] == [1, 20]
        assert checkpointer.verify(1) == checkpointer.checkpoints()[0]
        assert checkpointer.checkpoints()[1].tensors == 2
        assert checkpointer.checkpoints()[1].world_size == 1


def test_a_handle_of_a_save_in_progress(tmp_path: Path, plan: Plan) -> None:
    plan.set(BEFORE_THE_END)
    gate = plan.gate()
    with Checkpointer(tmp_path / "c") as checkpointer:
        handle = checkpointer.save(3, state_of(3))
        gate.arrived()
        assert (handle.step, handle.done(), handle.cancelled()) == (3, False, False)
        assert not handle.cancel()
        ended: list[Any] = []
        handle.add_done_callback(ended.append)
        assert repr(handle) == "<SaveHandle step=3 in progress>"
        for wait in (handle.wait, handle.result, handle.exception):
            with pytest.raises(TimeoutError, match="step 3 is not committed after") as late:
                wait(AT_ONCE)
            assert not isinstance(late.value, RestartError)
        for wait in (handle.wait, handle.result, handle.exception, checkpointer.wait):
            with pytest.raises(TypeError, match="timeout must be a number of seconds or a"):
                wait("soon")  # type: ignore[operator]
        with pytest.raises(TimeoutError, match="step 3"):
            checkpointer.wait(AT_ONCE)
        assert valid_steps(tmp_path / "c") == []
        with pytest.raises(ValueError, match="step 3 is being saved already"):
            checkpointer.save(3, state_of(3))
        gate.open()
        handle.wait(NET)
        checkpointer.wait(AT_ONCE)
        assert (handle.done(), handle.exception(), handle.result()) == (True, None, 3)
        assert concurrent.futures.wait([handle], 0).done == {handle}
        assert ended == [handle]
        assert repr(handle) == "<SaveHandle step=3 committed>"


def test_a_step_is_replaced_by_its_next_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for value in (1.0, 2.0, 3.0):
            checkpointer.save(5, {"x": torch.full((3,), value)}).wait(NET)
        state = {"x": torch.zeros(3)}
        assert checkpointer.restore(state, step=5) == 5
        assert state["x"].tolist() == [3.0] * 3
    assert valid_steps(tmp_path) == [5]
    assert left_over(tmp_path) == []


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_in_flight": 0, "threads": 0, "on_failure": "ignore"}
    options |= {"timeout": -1, "linger": float("inf")}
    for name, value in options.items():
        with pytest.raises(
            ValueError, match=rf"{name} must be .*, not {value!r}|{name} must not be"
        ):
            Checkpointer(tmp_path, **{name: value})
    for name in ("max_in_flight", "threads", "timeout", "linger"):
        for wrong in ("1", None, True):
            with pytest.raises(TypeError, match=f"{name} must be .*, not {wrong!r}"):
                Checkpointer(tmp_path, **{name: wrong})
    for rule in ("last", "every", "best"):
        with pytest.raises(TypeError, match=f"{rule} must be an int, not 1.5"):
            Retention(**{rule: 1.5})  # type: ignore[arg-type]


def test_steps_are_integers_of_any_kind(tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout": np.float32(60), "max_in_flight": np.int8(1)}
    kinds: list[Any] = [np.int64(1), np.uint8(2)]
    with Checkpointer(tmp_path, keep=Retention(last=kinds[1]), **options) as checkpointer:
        for step in kinds:
            assert type(checkpointer.save(step, state_of(int(step))).result(NET)) is int
        assert checkpointer.verify(kinds[1]).step == 2
        assert checkpointer.restore(blank(), step=kinds[0]) == 1
        checkpointer.delete(kinds[0])
        wrong: list[Any] = [1.0, np.float64(1.0), "1", True, np.True_]
        for step in wrong:
            for use, arguments in (
                (checkpointer.save, (step, {})),
                (checkpointer.verify, (step,)),
                (checkpointer.delete, (step,)),
                (partial(checkpointer.restore, step=step), ({},)),
            ):
                with pytest.raises(TypeError, match="step must be an int, not"):
                    use(*arguments)
    assert valid_steps(tmp_path) == [2]


REFUSED: list[tuple[Any, Any, str]] = [
    (-1, {}, "step must be at least 0, not -1"),
    (1, [torch.ones(1)], "state_dict must be a dict, not a list"),
    (1, {"a": {1.5: 0}}, "has the key 1.5"),
    (1, {"a": [{(1, 2): 0}]}, r"\['a'\]\[0\] has the key \(1, 2\)"),
    (1, {True: 0}, "has the key True"),
    (1, {"a.b": 1, "a": {"b": 2}}, "a.b"),
    (1, {1: 1, "1": 2}, "1"),
]


def test_invalid_saves_are_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step, state, message in REFUSED:
            with pytest.raises((ValueError, TypeError, CheckpointUnsavable), match=message):
                checkpointer.save(step, state)
        checkpointer.save(1, state_of(1)).wait(NET)
    assert valid_steps(tmp_path) == [1]


def test_a_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):  # each gives its buffer back
            with pytest.raises(CheckpointError, match=r"'opt\.fn' cannot be saved: a lambda"):
                checkpointer.save(step, {"opt": {"fn": lambda: None}, "x": torch.ones(3)})
        checkpointer.save(9, state_of(9)).wait(NET)
    assert restored(tmp_path) == 9


def test_a_closed_checkpointer_saves_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    checkpointer.abort()
    for use in (
        lambda: checkpointer.save(1, {}),
        lambda: checkpointer.restore({}),
        lambda: checkpointer.delete(1),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_an_error_is_raised_by_the_next_save_unless_it_was_seen(tmp_path: Path, plan: Plan) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        plan.set({"op": "finish", "do": "EIO"})
        handle = checkpointer.save(1, state_of(1))
        with pytest.raises(CheckpointError, match=r"save of step 1 failed on rank 0.*Input/output"):
            handle.wait(NET)
        assert handle.done()
        assert isinstance(handle.exception(), CheckpointError)
        assert repr(handle) == "<SaveHandle step=1 failed>"
        checkpointer.save(2, state_of(2))
        _ended(checkpointer)
        plan.set()
        with pytest.raises(CheckpointError, match="save of step 2"):
            checkpointer.save(3, state_of(3))
        checkpointer.wait(NET)  # the one that raised is in progress all the same
    assert valid_steps(tmp_path / "c") == [3]
    assert left_over(tmp_path / "c") == []


def test_a_number_of_failures_in_a_row_is_tolerated(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "c", on_failure=FailurePolicy(1)) as checkpointer:
        for step, fails in enumerate((False, True, False, True, True)):
            plan.set(*([{"op": "make", "do": "EIO"}] if fails else []))
            checkpointer.save(step, state_of(step))
            _ended(checkpointer)
        plan.set()
        with pytest.raises(CheckpointError, match="step 4"):  # the second in a row
            checkpointer.save(5, state_of(5))
        checkpointer.save(6, state_of(6)).wait(NET)
    assert valid_steps(tmp_path / "c") == [0, 2, 5, 6]
    # What failed, its cause, what the policy does; without the traceback of the other process.
    tolerated = [r.getMessage().split("\n") for r in caplog.records if r.levelname == "WARNING"]
    assert [lines[0].partition(" failed on rank 0 on ")[0] for lines in tolerated] == [
        "the save of step 1",
        "the save of step 3",
    ]
    end = (
        ": OSError: [Errno 5] Input/output error. Training continues: failure 1 of at most 1 in a "
    )
    for lines in tolerated:
        assert lines[0].endswith(end + "row is tolerated")
        assert len(lines) == 1
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert error.startswith("the save of step 4 failed on rank 0")


@pytest.mark.parametrize(("another", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_a_failure_is_shown_by_the_rank_that_failed(
    another: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    policy, error = FailurePolicy(1), CheckpointError("no room")
    error.of_another_rank = another
    with caplog.at_level(logging.DEBUG):
        assert [policy.failed(error), policy.failed(error)] == [True, False]
    assert [record.levelno for record in caplog.records] == [level]


def _ended(checkpointer: Checkpointer) -> None:
    for save in checkpointer.saves.pending:
        assert save.handle._await_end(60)


def test_close_raises_an_unseen_error(tmp_path: Path, plan: Plan) -> None:
    plan.set({"op": "publish", "do": "EACCES"})
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, state_of(1))
    with pytest.raises(CheckpointError, match=r"not committed: rank 0 could not.*Permission"):
        checkpointer.close()
    assert left_over(tmp_path / "c") == []


def test_close_drops_saves_that_take_too_long(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path / "c", 1)
    plan.set(BEFORE_THE_END)
    gate = plan.gate()
    checkpointer = Checkpointer(tmp_path / "c")
    handle = checkpointer.save(2, state_of(2))
    gate.arrived()
    with pytest.raises(CheckpointError, match=r"steps \[2\] were not committed within"):
        checkpointer.close(AT_ONCE)
    for wait in (handle.result, handle.exception, handle.wait):
        with pytest.raises(SaveCancelled, match=r"save of step 2 was dropped for all ranks"):
            wait(NET)
    with pytest.raises(concurrent.futures.CancelledError):
        handle.result()
    assert handle.cancelled()
    assert repr(handle) == "<SaveHandle step=2 dropped>"
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert valid_steps(tmp_path / "c") == [1]
    assert restored(tmp_path / "c") == 1
    assert left_over(tmp_path / "c") == []


def test_an_error_leaves_the_block_unchanged_and_saves_are_finished(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state_of(4))
        raise ZeroDivisionError
    assert restored(tmp_path) == 4


def test_delete_of_present_and_missing_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with Checkpointer(tmp_path) as checkpointer:
        for use in (checkpointer.delete, checkpointer.verify):
            with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[1, 2\]"):
                use(3)
        with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
            checkpointer.restore({}, step=3)
        checkpointer.delete(2)
    assert not folder_of(tmp_path, 2).exists()
    assert restored(tmp_path) == 1
