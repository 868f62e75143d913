"""Restarts and ends of calls that nvidia-resiliency-ext 0.4 has in the same way."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from procs import Job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "code"),
    [("fails_often", 0), ("does_not_run", -signal.SIGTERM), ("returns_anything", 0)],
)
def test_equal_faults_results_of_policies_and_a_stopped_rank(
    ranks: Callable[..., Job], scenario: str, code: int
) -> None:
    with ranks("nvrx_calls", scenario, nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: code}, job.errors(0)
