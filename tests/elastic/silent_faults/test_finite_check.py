"""A job whose parameters or loss are not finite any more ends, names them, and keeps the newest
checkpoint from before.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from elastic.silent_runs import Ranks, Run
from outlast.elastic import FiniteCheck
from outlast.elastic.silent_faults.layout import element_slices
from outlast.errors import NO_RESTART, NonFinite
from outlast.events.emitter import MemorySink
from outlast.events.types import NonFiniteFound

HOST = socket.gethostname()
# The exponent of a weight below 2 becomes that of a value above 1e38.
FLIP: dict[str, Any] = {"flip": 1, "flip_at": 7, "high": 30, "every": 3, "job": {"keep": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("loss", [False, True])
def test_a_flipped_bit_ends_the_job_and_the_next_one_continues_from_before(
    ranks: Ranks, tmp_path: Path, loss: bool
) -> None:
    run = Run(ranks, tmp_path, 2, **FLIP, steps=60, loss=loss)
    errors = run.errors
    assert set(run.codes.values()) == {NO_RESTART}, errors
    event = run.found(NonFiniteFound)[0]
    assert (event.step, event.first, event.first_host) == (8, 1, HOST)
    assert event.origin == ("loss" if loss else "gradients")
    assert event.parameters == ["second.weight"]
    text = (
        "the loss of rank 1 on"
        if loss
        else f"not finite, first in the gradients of rank 1 on {HOST}"
    )
    assert any(text in error for error in errors), errors
    assert any("; its first.weight has a value of " in error for error in errors), errors
    kept = "the newest checkpoint with finite parameters is that of step 6"
    assert any(kept in error for error in errors)

    again = Run(ranks, tmp_path, 2, **FLIP, steps=12)
    assert set(again.codes.values()) == {0}, again.errors
    assert {line["step"] for line in again.of("restored")} == {6}


@pytest.mark.slow
def test_without_the_check_training_goes_on_and_the_checkpoint_from_before_stays(
    ranks: Ranks, tmp_path: Path
) -> None:
    """As before there was a check: the job ends well, with NaN."""
    ignored = {"finite": {"on_non_finite": "report"}}
    run = Run(ranks, tmp_path, 2, **FLIP, steps=40, **ignored)
    assert set(run.codes.values()) == {0}, run.errors
    assert "after step 8: " in run.errors[0]
    assert "first in the gradients of rank 1" in run.errors[1]
    assert run.found(NonFiniteFound)[0].step == 8
    again = Run(ranks, tmp_path, 2, **FLIP, steps=12)
    assert set(again.codes.values()) == {0}, again.errors
    assert {line["step"] for line in again.of("restored")} == {6}
    assert (
        "restored step 6, from before values of the parameters became infinite" in again.errors[0]
    )
    assert "deleted the checkpoints of later steps: 40" in again.errors[0]


def job_of(path: Path, model: nn.Module, **options: Any) -> outlast.Job:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outlast.Job(path, model=model, optimizer=optimizer, every=2, keep=1, **options)


def steps(job: outlast.Job, count: int, **options: Any) -> None:
    for _ in range(count):
        job.optimizer.zero_grad()
        job.model(torch.ones(2, 4)).sum().backward()
        job.optimizer.step()
        job.step(**options)


def test_the_parameter_and_the_step_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(NonFinite) as raised, job_of(tmp_path, model) as job:
        job.restore()
        steps(job, 5)
        job.checkpointer.wait()
        with torch.no_grad():
            model[1].weight[0, 2] = torch.inf
        job.step()
    assert str(raised.value) == (
        f"after step 6: values of 1.weight on rank 0 on {HOST} are not finite; the newest "
        "checkpoint with finite parameters is that of step 4"
    )


def test_gradients_that_are_not_finite_are_named_with_their_step(tmp_path: Path) -> None:
    sink, text = MemorySink(), "weight, bias are not finite, first in the gradients of rank 0"
    job = job_of(tmp_path, nn.Linear(4, 1), events=sink)
    with pytest.raises(NonFinite, match=text), job:
        job.restore()
        steps(job, 4)
        job.model.register_forward_hook(lambda *found: found[-1] * torch.inf)
        steps(job, 4)
    found = [event for event in sink.events if isinstance(event, NonFiniteFound)]
    assert [(event.step, event.since, event.origin) for event in found] == [(5, 4, "gradients")]


def test_a_loss_that_is_not_finite_is_enough(tmp_path: Path) -> None:
    with job_of(tmp_path, nn.Linear(4, 1)) as job:
        job.restore()
        steps(job, 2, loss=1.5)
        steps(job, 1, loss=torch.tensor(2.5))
        with pytest.raises(NonFinite, match=rf"after step 4: the loss of rank 0 on {HOST} is nan"):
            steps(job, 1, loss=torch.tensor(torch.nan))


def test_what_may_be_infinite_is_no_finding(tmp_path: Path) -> None:
    """Buffers, frozen parameters that were so from the beginning, gradients of a skipped step."""
    model = nn.Linear(4, 1)
    model.register_buffer("mask", torch.tensor([-torch.inf]))
    model.frozen = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)
    with job_of(tmp_path, model) as job:
        job.restore()
        model(torch.full((1, 4), torch.inf)).sum().backward()
        job.step()  # without a step of the optimizer, as GradScaler does it
        steps(job, 3)
        job.save().wait()
        assert [info.finite for info in job.checkpointer.checkpoints()] == [True]


def test_the_last_state_is_looked_at_before_it_is_saved(tmp_path: Path) -> None:
    """Of more than one slice: no step would have seen it."""
    model = nn.Sequential(nn.Linear(4, 1 << 19), nn.Linear(1 << 19, 1))
    with pytest.raises(NonFinite, match=r"values of 1\.bias on rank 0"):  # noqa: SIM117
        with job_of(tmp_path, model) as job:
            job.restore()
            steps(job, 1)
            with torch.no_grad():
                model[1].bias.fill_(torch.nan)
    with job_of(tmp_path, model) as job:  # the first one has released the folder
        assert job.restore() == 0


def test_it_can_be_told_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for action, known in (("report", False), ("ignore", None)):
        sink, model = MemorySink(), nn.Linear(4, 1)
        check = FiniteCheck(on_non_finite=action)
        with job_of(tmp_path / action, model, checks=check, events=sink) as job:
            job.restore()
            with torch.no_grad():
                model.weight[0, 0] = torch.nan
            with caplog.at_level(logging.ERROR):
                steps(job, 4, loss=torch.nan)
            assert [info.finite for info in job.checkpointer.checkpoints()][-1] is known
        found = [event.origin for event in sink.events if isinstance(event, NonFiniteFound)]
        assert found == (["loss", "parameters"] if action == "report" else [])
        assert len(caplog.records) == 2
    with pytest.raises(ValueError, match="on_non_finite must be"):
        FiniteCheck(on_non_finite="exclude")


@pytest.mark.parametrize("every", [1, 7, 100])
@pytest.mark.parametrize("sizes", [[3], [1, 2, 0, 3] * 50, [1 << 20, 5, 700_000, *[1] * 90]])
def test_every_element_is_in_one_slice(sizes: list[int], every: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.half)) for size in sizes]
    slices = element_slices(parameters, every)
    for each in slices:
        for parameter, begin, end in each:
            parameter.data[begin:end] += 1
    assert all((parameter == 1).all() for parameter in parameters)
    assert len(slices) <= every
