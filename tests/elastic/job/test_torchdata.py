"""torchdata's `StatefulDataLoader` with workers: samples count when they were trained on, not when
the workers have prefetched them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procs import Job

SAMPLES, EPOCHS = 40, 2  # as in the script
STOPPED = 143


@pytest.fixture
def train(ranks: Callable[..., Job], tmp_path: Path) -> Callable[..., Any]:
    """Runs `stateful_loader.py`; returns the events of each rank."""

    def train(folder: str, size: int, code: int, **plan: Any) -> list[list[dict[str, Any]]]:
        path = str(tmp_path / folder)
        arguments = json.dumps({"path": path, **plan})
        env = {"OUTLAST_CHECKPOINT_PATH": path}
        with ranks("stateful_loader", arguments, nprocs=size, env=env) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {code}, "\n".join(map(job.errors, range(size)))
            return [job.lines(rank) for rank in range(size)]

    return train


def trained(lines: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(line["epoch"], line["numbers"]) for line in lines if line["event"] == "trained"]


def stop_and_resume(
    train: Callable[..., Any], size: int, stop: int, **plan: Any
) -> list[list[tuple[int, list[int]]]]:
    """The samples of each rank, before the stop and after: each sample once per epoch."""
    before = train("stopped", size, STOPPED, seed=1, stop=stop, **plan)
    after = train("stopped", size, 0, seed=2, **plan)
    assert all(trained(lines) for lines in (*before, *after)), "both have trained"
    together = [trained(one) + trained(other) for one, other in zip(before, after, strict=True)]
    for epoch in range(EPOCHS):
        numbers = [n for rank in together for number, each in rank if number == epoch for n in each]
        assert sorted(numbers) == list(range(SAMPLES))
    return together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "size", "stop"),
    [
        ("map", "loader", 2, 4),
        ("stream", "loader", 2, 4),
        ("stream", "state", 1, 4),
        ("map", "states", 1, 4),
        ("stream", "states", 1, 14),  # after the last step of an epoch
    ],
)
def test_a_job_stopped_within_an_epoch_continues_with_the_remaining_samples(
    train: Callable[..., Any], kind: str, given: str, size: int, stop: int
) -> None:
    """The loader is given to a `Job` as `loader`, or by name (`state`), or as a `StateDictState`
    (`states`).
    """
    stop_and_resume(train, size, stop, kind=kind, given=given)


@pytest.mark.slow
def test_the_random_order_is_that_of_a_training_that_was_not_stopped(
    train: Callable[..., Any],
) -> None:
    reference = train("reference", 1, 0, seed=1)
    together = stop_and_resume(train, 1, 4)
    assert together == [trained(lines) for lines in reference]
