"""The end of an iteration of the loop, and `Job.after_steps`, in one process."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from elastic.small_jobs import job
from outlast.elastic.job.iteration import ENDED, STEPPED


class Count:
    """An object of `states`."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Killed(BaseException):
    pass


def train(one: outlast.Job) -> None:
    one.optimizer.zero_grad()
    one.model(torch.rand(1, 1)).square().sum().backward()
    one.optimizer.step()


def restored(path: Path, **options: Any) -> tuple[int, int, float, int]:
    """What the newest checkpoint has: the step, the count, the next random number, the epoch."""
    count = Count()
    with job(path, states={"count": count}, **options) as one:
        step = one.restore()
        number = torch.rand(1).item()
    return step, count.value, number, one.epoch


def test_a_save_that_is_due_has_what_the_whole_body_did(tmp_path: Path) -> None:
    count, saved = Count(), []
    with pytest.raises(Killed), job(tmp_path, states={"count": count}, every=2) as one:
        one.restore()
        for _ in one.epochs(1):
            for number in one.batches(range(5)):
                train(one)
                one.step()
                count.value += 10 * number
                torch.rand(number)
                at_end = torch.get_rng_state()
                one.checkpointer.wait()
                saved.append(one.checkpointer.checkpoints()[-1].step)
                if one.steps == 4:
                    wanted = at_end
                if number == 4:
                    raise Killed
    assert saved == [0, 0, 2, 2, 4]
    found = restored(tmp_path)
    torch.set_rng_state(wanted)
    assert found == (4, 0 + 10 + 20 + 30, torch.rand(1).item(), 0)


def test_the_end_of_an_epoch_may_write_to_the_weights(tmp_path: Path) -> None:
    """An evaluation of an average puts its weights into the model, and takes them out again, while
    the save of the epoch's last step would be copied.
    """
    wanted = []
    with job(tmp_path, every=2, keep=3) as one:
        one.restore()
        weight = one.model.weight
        for _ in one.epochs(2):
            for _ in one.batches(range(2)):
                train(one)
                one.step()
            kept = weight.detach().clone()
            wanted.append(kept.item())
            with torch.no_grad():
                weight.fill_(7.0)
                one.checkpointer.wait()
                weight.copy_(kept)
    assert [info.step for info in one.checkpointer.checkpoints()] == [0, 2, 4]
    for step, value in zip((2, 4), wanted, strict=True):
        state = {"model": {"weight": torch.zeros(1, 1)}}
        with outlast.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state, step=step, strict=False)
        assert state["model"]["weight"].item() == value


@pytest.mark.parametrize("counts", ["batches", "steps"])
def test_a_save_within_an_accumulation_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counts: str
) -> None:
    """`job.step()` with each batch, or with each step of the optimizer, which takes two."""
    with job(tmp_path, every=1) as one:
        one.restore()
        for _ in one.epochs(2):
            for number in one.batches(range(4)):
                one.model(torch.rand(1, 1)).square().sum().backward()
                if number % 2:
                    one.optimizer.step()
                    one.optimizer.zero_grad()
                if number % 2 or counts == "batches":
                    one.step()
    said = [each.getMessage() for each in caplog.records if "accumulated" in each.getMessage()]
    assert len(said) == (counts == "batches"), said
    assert all("no optimizer has stepped in step 1, which is saved" in each for each in said)


def test_a_step_that_is_left_out_for_its_gradients_is_no_accumulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a `GradScaler`."""
    with job(tmp_path, every=1) as one:
        one.restore()
        for _ in one.epochs(1):
            for number in one.batches(range(4)):
                one.optimizer.zero_grad()
                factor = float("inf") if number == 2 else 1.0
                one.model(torch.rand(1, 1)).sum().mul(factor).backward()
                if number != 2:
                    one.optimizer.step()
                one.step()
    assert not [each for each in caplog.records if "accumulated" in each.getMessage()]


def test_a_loop_that_was_left_ends_its_step_with_its_epoch(tmp_path: Path) -> None:
    seen, ends = [], []
    for kills in (True, False):
        count = Count()
        with (
            contextlib.suppress(Killed),
            job(tmp_path, states={"count": count}, every=1) as one,
        ):
            one.restore()
            for epoch in one.epochs(3):
                ends.append((epoch, count.value))
                if kills and epoch == 1:
                    one.checkpointer.wait()
                    raise Killed
                for number in one.batches(range(5)):
                    seen.append((epoch, number))
                    train(one)
                    one.step()
                    if number == 1:
                        break
                count.value += 1  # the end of the epoch
    assert seen == [(epoch, number) for epoch in range(3) for number in range(2)]
    assert ends == [(0, 0), (1, 1), (1, 1), (2, 2)]


def test_an_evaluation_after_a_loop_that_was_left_does_not_end_its_step(tmp_path: Path) -> None:
    ends = []
    for kills in (True, False):
        count = Count()
        with (
            contextlib.suppress(Killed),
            job(tmp_path, states={"count": count}, every=1) as one,
        ):
            one.restore()
            for _ in one.epochs(1):
                for number in one.batches(range(5)):
                    train(one)
                    one.step()
                    if number == 1:
                        break
                for number in one.batches(range(2)):
                    if kills and number == 1:
                        one.checkpointer.wait()
                        raise Killed
                    count.value += 1
            ends.append(count.value)
    assert ends == [2]


def test_a_batch_that_is_fetched_ahead_tears_no_step(tmp_path: Path) -> None:
    with pytest.raises(Killed), job(tmp_path, every=1, keep=9) as one:
        one.restore()
        for _ in one.epochs(1):
            batches, weights = iter(one.batches(range(6))), []
            next(batches)
            for _ in range(4):
                train(one)
                next(batches)  # between the optimizer's step and that of the job
                one.step()
                weights.append(one.model.weight.item())
            one.checkpointer.wait()
            saved = [info.step for info in one.checkpointer.checkpoints()]
            raise Killed
    assert saved[1:] == [2, 4]
    for step in saved[1:]:
        with job(tmp_path) as one:
            one.restore(step)
            assert one.model.weight.item() == weights[step - 1]


def test_a_save_by_hand_in_the_body(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has the state of that moment; one that is due replaces it, and keeps its metric."""
    count = Count()
    with pytest.raises(Killed), job(tmp_path, states={"count": count}, every=2, keep=9) as one:
        one.restore()
        for _ in one.epochs(1):
            for _ in one.batches(range(3)):
                train(one)
                one.step()
                one.save(metric=-float(one.steps)).wait()
                if one.steps == 3:
                    raise Killed
                count.value += 1
    with caplog.at_level(logging.WARNING, "outlast"):
        assert restored(tmp_path)[:2] == (3, 2)
    assert "what stands after job.save() at test_iterations.py:" in caplog.text
    assert "was not run for step 3" in caplog.text
    metrics = {info.step: info.metric for info in one.checkpointer.checkpoints()}
    assert metrics[2] == -2.0
    caplog.clear()
    with job(tmp_path, states={"count": count}) as one:
        one.restore(2)
        assert count.value == 2
    assert "was not run" not in caplog.text


def test_a_stop_has_what_the_whole_body_did(tmp_path: Path) -> None:
    count = Count()
    with pytest.raises(SystemExit), job(tmp_path, states={"count": count}) as one:
        one.restore()
        for _ in one.epochs(1):
            for _ in one.batches(range(10**9)):
                train(one)
                if one.steps == 1:
                    one.stop()  # agreed on by a thread, some steps later
                one.step()
                count.value += 1
    found = restored(tmp_path)
    assert found[0] == found[1] >= 2


def test_functions_of_a_step(tmp_path: Path) -> None:
    done: list[Any] = []
    count = Count()

    def evaluate() -> None:
        done.append(("evaluate", one.steps, sum(one.batches(range(3)))))
        count.value += 1

    def keep() -> None:
        handle = one.save(metric=float(count.value))
        with pytest.raises(ValueError, match="begins when what it is a part of is over"):
            handle.wait()
        done.append(handle)

    with job(tmp_path, states={"count": count}, keep=outlast.Retention(best=1)) as one:
        one.after_steps(2, evaluate)
        one.after_steps(4, keep)
        one.restore()
        for _ in one.epochs(1):
            for _ in one.batches(range(5)):
                train(one)
                one.step()
                done.append(one.steps)
    first, last = ("evaluate", 2, 3), ("evaluate", 4, 3)
    handle = done.pop(5)
    assert done == [1, first, 2, 3, last, 4, 5]
    assert (handle.step, handle.result(), handle.succeeded) == (4, 4, True)
    metrics = {info.step: info.metric for info in one.checkpointer.checkpoints()}
    assert metrics[4] == 2.0


def test_misuse_of_functions(tmp_path: Path) -> None:
    def step_again() -> None:
        one.step()

    with job(tmp_path) as one:
        with pytest.raises(ValueError, match="n must be at least 1"):
            one.after_steps(0, step_again)
        with pytest.raises(TypeError, match="must be callable"):
            one.after_steps(1, None)  # type: ignore[arg-type]
        one.after_steps(1, step_again)
        one.restore()
        with pytest.raises(ValueError, match=r"step_again\) after job.restore\(\)"):
            one.after_steps(1, step_again)
        with pytest.raises(ValueError, match=r"job.step\(\) in step_again") as raised:
            one.step()
        assert not hasattr(raised.value, "__notes__") or "step_again" in raised.value.__notes__[0]


def test_functions_that_had_not_ended_run_again_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From a checkpoint here, as a stop in a restart leaves one: before the functions."""
    drawn: list[Any] = []
    count = Count()
    for restart in range(2):
        with pytest.raises(Killed), job(tmp_path, states={"count": count}) as one:

            def evaluate() -> None:
                number = torch.rand(1).item()
                drawn.append((one.steps, number, count.value))
                count.value += 1
                if one._end.running:
                    assert sum(one.batches(range(3))) == 3  # outside of a loop over epochs
                    one.save(metric=1.0)

            one.after_steps(2, evaluate)
            one.after_steps(3, drawn.clear)
            with caplog.at_level(logging.WARNING, "outlast"):
                one.restore()
            if not restart:
                one._training.counters.steps = 2
                one._training.iteration.phase = STEPPED
                one._saves.save().wait()
                evaluate()
            one.checkpointer.wait()
            raise Killed
    assert len(drawn) == 2
    assert len(set(drawn)) == 1, "the same numbers, from the same state"
    assert one._training.iteration.phase == ENDED
    assert "running test_functions" not in caplog.text
    assert restored(tmp_path)[:2] == (2, 1), "the save that the function asked for"


def test_the_last_save_has_what_functions_did_in_the_restore(tmp_path: Path) -> None:
    for restart in range(2):
        count = Count()
        with contextlib.suppress(Killed), job(tmp_path, states={"count": count}) as one:

            def evaluate(count: Count = count) -> None:
                count.value += 1

            one.after_steps(2, evaluate)
            one.restore()
            if not restart:  # as a stop in a restart leaves one
                one._training.counters.steps = 2
                one._training.iteration.phase = STEPPED
                one._saves.save().wait()
                raise Killed
    assert restored(tmp_path)[:2] == (2, 1)


def test_an_optimizer_that_is_ahead_at_the_end_of_an_epoch_is_not_saved(tmp_path: Path) -> None:
    with job(tmp_path, every=1, keep=9) as one:
        one.restore()
        for epoch in one.epochs(2):
            if epoch:
                one.checkpointer.wait()
                assert all(each.step != 1 for each in one.checkpointer.checkpoints())
            for _ in one.batches(range(2)):
                train(one)
                one.step()
                break
            train(one)  # a step that is not counted


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_save_between_the_optimizer_and_the_job_is_refused(
    tmp_path: Path, own_loop: bool
) -> None:
    """It would have the weights of a step that a job makes again which continues there."""
    with job(tmp_path, keep=9) as one:
        one.restore()
        loop = (number for _ in one.epochs(1) for number in one.batches(range(3)))
        for number in range(3) if own_loop else loop:
            train(one)
            with pytest.raises(ValueError, match=f"after step {number}: a job that continues"):
                one.save()
            one.step()
            one.save().wait()
    assert [info.step for info in one.checkpointer.checkpoints()] == [0, 1, 2, 3]


def test_a_step_in_a_function_of_the_step_belongs_to_it(tmp_path: Path) -> None:
    with job(tmp_path, keep=9) as one:
        one.after_steps(2, lambda: train(one))
        one.restore()
        for _ in range(4):
            train(one)
            one.step()
            one.save().wait()


def test_a_restore_takes_back_a_step_that_was_not_counted(tmp_path: Path) -> None:
    with job(tmp_path, keep=9) as one:
        one.restore()
        train(one)
        one.step()
        one.save().wait()
        train(one)
        one.restore()
        one.save().wait()
