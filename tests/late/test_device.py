"""The device `late` itself, its process group, and saves of what is still being computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job

Ranks = Callable[..., Job]
# The first test builds the device, which takes a core for a minute.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["a_copy_needs_its_event", "a_training_is_that_of_the_cpu"])
def test_the_device(ranks: Ranks, scenario: str) -> None:
    with ranks("once", scenario, nprocs=1) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0}, job.errors(0)


@pytest.mark.parametrize("scenario", ["results_are_those_of_gloo", "the_host_runs_ahead"])
def test_the_process_group(ranks: Ranks, scenario: str) -> None:
    with ranks("group", scenario) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, job.errors(0) + job.errors(1)


def test_an_abort_alone_ends_a_collective_without_its_peer(ranks: Ranks) -> None:
    with ranks("group", "a_dead_peer_blocks_the_stream") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: -9}, job.errors(0) + job.errors(1)


def test_saves_have_the_state_of_their_moment(ranks: Ranks, tmp_path: Path) -> None:
    with ranks("once", "saves", str(tmp_path), nprocs=1) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0}, job.errors(0)
