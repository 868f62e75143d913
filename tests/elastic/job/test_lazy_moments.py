"""Moments that a checkpoint lacks are not in the optimizer of a sharded model after a restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procs import Job

Ranks = Callable[..., Job]


def run(ranks: Ranks, path: Path, stop: int, optimizer: str, *frozen: str) -> list[Any]:
    with ranks("lazy_expert", str(path), str(stop), optimizer, *frozen) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0)
        (line,) = [line for line in job.lines(0) if line["event"] == "ended"]
    return [line["whole"], line["steps"]]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_expert_that_was_not_used_before_the_checkpoint(
    ranks: Ranks, tmp_path: Path, optimizer: str
) -> None:
    run(ranks, tmp_path / "resumed", 3, optimizer)
    resumed = run(ranks, tmp_path / "resumed", 0, optimizer)
    assert resumed == run(ranks, tmp_path / "whole", 0, optimizer)


@pytest.mark.slow
def test_a_layer_that_is_frozen_at_the_checkpoint_keeps_its_moments(
    ranks: Ranks, tmp_path: Path
) -> None:
    run(ranks, tmp_path / "resumed", 4, "adam", "0")
    resumed = run(ranks, tmp_path / "resumed", 0, "adam", "4")
    assert resumed == run(ranks, tmp_path / "whole", 0, "adam", "0")
