"""Which silence is a hang: a rank that works is none, nor are those that wait for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inprocess.job_output import errors, full, returned, views
from procs import Job

Ranks = Callable[..., Job]
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("work", "wait", "pings"),
    [
        ("python", "barrier", "pings"),
        ("python", "work", "pings"),
        ("python", "store", "silent"),
        ("python", "return", "pings"),
        ("compile", "barrier", "pings"),
        ("native", "barrier", "silent"),
        ("gil", "work", "pings"),
    ],
)
@pytest.mark.slow
@pytest.mark.exhaustive
def test_work_that_takes_longer_than_the_soft_timeout_is_no_hang(
    ranks: Ranks, work: str, wait: str, pings: str
) -> None:
    with ranks("evaluates", "evaluates", work, wait, pings, nprocs=3) as job:
        job.start_all()
        assert job.wait_all(90) == dict.fromkeys(range(3), 0), errors(job)
        assert returned(job) == dict.fromkeys(range(3), 0)
        assert views(job) == {0: full(3)}


@slow
@pytest.mark.parametrize("how", ["lock", "sleep"])
def test_a_blocked_rank_is_found_beside_one_that_works(ranks: Ranks, how: str) -> None:
    with ranks("evaluates", "blocked_beside", how, nprocs=3) as job:
        job.start_all()
        assert job.wait_all(90) == dict.fromkeys(range(3), 0), errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert "restart of iteration 0: rank 2 on " in job.errors(2)
        assert "no progress" in job.errors(2)


@slow
@pytest.mark.parametrize("how", ["all_wait", "returns_last"])
def test_ranks_that_all_wait_hang(ranks: Ranks, how: str) -> None:
    with ranks("evaluates", how, nprocs=3) as job:
        job.start_all()
        assert job.wait_all(90) == dict.fromkeys(range(3), 0), errors(job)
        assert views(job) == {0: full(3), 1: full(3)}


@slow
@pytest.mark.parametrize("how", ["pings", "silent"])
def test_an_endless_loop_is_found_after_the_ping_timeout(ranks: Ranks, how: str) -> None:
    with ranks("evaluates", "endless", how, nprocs=2) as job:
        job.start_all()
        assert job.wait_all(90) == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert "restart of iteration 0: rank 1 on " in job.errors(1), errors(job)
        assert "evaluates.py" in job.errors(1)
