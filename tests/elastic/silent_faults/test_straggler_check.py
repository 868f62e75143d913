"""A rank that is slower than the others is found, and named."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.silent_runs import Ranks, Run
from outlast.elastic.silent_faults import own_time
from outlast.elastic.silent_faults.straggler_check import SlowRanks, Window
from outlast.events.types import StragglerFound

HOST = socket.gethostname()


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocked",
    [
        pytest.param({}, id="in the forward pass"),
        # The other ranks wait before the forward pass, where DDP broadcasts the buffers.
        pytest.param({"slow_data": True, "batch_norm": True}, id="with DDP's broadcast"),
        pytest.param(
            {"slow_data": True, "logs": True}, id="with a collective", marks=pytest.mark.slow
        ),
        pytest.param(
            {"slow_s": 0.02, "base_s": 0.05, "batch_norm": True},
            id="1.4 times as slow",
            marks=pytest.mark.slow,
        ),
        # The other ranks wait in the middle of the forward pass, for the shards of the next layer.
        pytest.param({"shards": 3, "layers": True}, id="sharded", marks=pytest.mark.slow),
        pytest.param(
            {"shards": 3, "layers": True, "slow_data": True, "logs": True},
            id="sharded, with a collective",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_slow_rank_is_named(ranks: Ranks, tmp_path: Path, blocked: dict[str, Any]) -> None:
    plan = {"slow": 1, "slow_s": 0.05, "await": True, "stragglers": {"window": 5, "windows": 2}}
    run = Run(ranks, tmp_path, 3, every=None, **{**plan, **blocked})
    assert set(run.codes.values()) == {0}, run.errors
    first, *_ = run.found(StragglerFound)
    assert (first.rank, first.straggler, first.straggler_host) == (0, 1, HOST)
    assert first.seconds > 0.05
    assert first.seconds > 1.3 * first.typical_seconds
    assert f"rank 1 on {HOST} is a straggler after step {first.step}" in run.errors[0]
    assert {line["of"] for line in run.of("told")} == {0, 1, 2}


@pytest.mark.slow
def test_equal_ranks_of_a_sharded_model_are_not_slow(ranks: Ranks, tmp_path: Path) -> None:
    """Each step takes 50 ms: more than what a busy machine adds to most steps of one rank."""
    plan = {"steps": 80, "base_s": 0.05, "shards": 2, "layers": True}
    stragglers = {"window": 10, "factor": 2.0}
    run = Run(ranks, tmp_path, 4, every=None, stragglers=stragglers, **plan)
    assert set(run.codes.values()) == {0}, run.errors
    assert not run.found(StragglerFound)
    assert not any("stragglers cannot be found" in error for error in run.errors), run.errors


def test_the_functions_that_are_timed_are_restored() -> None:
    def functions() -> list[Any]:
        return [getattr(owner, name) for owner, name in own_time._waiting_functions()]

    before = functions()
    first, second = own_time._Waits(time.perf_counter), own_time._Waits(time.perf_counter)
    assert all(now is not then for now, then in zip(functions(), before, strict=True))
    first.stop()
    assert functions() != before
    second.stop()
    second.stop()
    assert functions() == before


def windows(judge: SlowRanks, *medians: list[float | None]) -> list[list[int]]:
    """The ranks that are found after each window."""
    found = []
    for number, each in enumerate(medians):
        found.append([slow.straggler for slow in judge([Window(number, "h", m) for m in each])])
    return found


def test_a_rank_is_found_after_several_slow_windows_in_a_row() -> None:
    slow, well = [0.010, 0.015, 0.010, 0.010], [0.010] * 4
    judge = SlowRanks(factor=1.3, windows=3)
    assert windows(judge, slow, slow, well, slow, slow, slow) == [[], [], [], [], [], [1]]
    assert windows(judge, slow, slow) == [[], []], "once, until it has recovered"
    assert windows(judge, well, slow, slow, slow) == [[], [], [], [1]]


@pytest.mark.parametrize(
    "medians",
    [
        [0.010, 0.0125, 0.010],  # less than the factor
        [0.010, 0.030, 0.020, 0.024],  # the others differ as much
        [0.0001, 0.0004, 0.0001],  # too short to say
        [0.010, None, 0.010],  # no times
        [None, 0.010, None],  # nothing to compare with
    ],
)
def test_what_is_not_a_straggler(medians: list[float | None]) -> None:
    assert windows(SlowRanks(factor=1.3, windows=1), medians) == [[]]


def test_one_of_two_ranks_can_be_slow() -> None:
    assert windows(SlowRanks(factor=1.3, windows=1), [0.020, 0.010]) == [[0]]
