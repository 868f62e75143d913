"""Exceptions of signal handlers, and those on their way out, while a restart is under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inprocess.job_output import errors, events, full, views
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.parametrize(
    ("restarts", "step"), [(5, 9), pytest.param(60, 1, marks=pytest.mark.slow)]
)
def test_a_handler_that_raises_at_any_moment_of_a_restart_costs_nothing(
    ranks: Ranks, restarts: int, step: int
) -> None:
    with ranks("handlers", "at_each_moment", str(restarts), str(step), nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == dict.fromkeys(range(restarts + 1), full(2))
        struck = [line["number"] for line in events(job, 0, "struck")]
        (told,) = events(job, 0, "moments")
        # A restart has as many moments, more or less; the last ones have fewer than their number.
        assert struck[:5] == list(range(1, 46, step))[:5]
        if step == 1:
            assert struck[:30] == list(range(1, 31))
            assert told["last"] < restarts
        assert "TimeoutError: a user's alarm" in job.errors(0)
        assert "handler of SIGALRM raised an exception; the call goes on" in job.errors(0)


def test_an_exception_whose_finally_waits_is_the_cause_at_once(ranks: Ranks) -> None:
    with ranks("waiting_errors", "in_a_finally", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        said = job.errors(1)
        assert "ArithmeticError: the real cause, at waiting_errors.py:" in said
        assert said.count("restart of iteration") == 1
        assert "no progress" not in errors(job)


def test_an_exception_that_all_ranks_catch_is_no_fault(ranks: Ranks) -> None:
    with ranks("waiting_errors", "that_all_ranks_catch", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2)}


@pytest.mark.slow
def test_a_hang_while_an_exception_is_handled_names_that_first(ranks: Ranks) -> None:
    with ranks("waiting_errors", "in_a_handler", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        (restart,) = [
            line for line in job.errors(1).splitlines() if "restart of iteration 0" in line
        ]
        start = "ArithmeticError: the real cause; while it was handled, no progress "
        assert restart.partition(": ")[2].partition(": ")[2].startswith(start), restart
        assert 'raise ArithmeticError("the real cause")' in job.errors(1)
