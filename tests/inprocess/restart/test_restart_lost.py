"""Processes that are killed, stopped or hang: the others continue, and no process is left over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from inprocess.job_output import assert_never_together, errors, events, full, returned, said, views
from procs import Job

Ranks = Callable[..., Job]
KILLED = -signal.SIGKILL


def _ready(job: Job, iteration: int = 0) -> dict[int, int]:
    """Waits until all ranks are in the function; returns the pids of their monitors."""
    lines = {
        rank: job.wait_for_line(rank, said("ready", iteration=iteration))
        for rank in range(job.nprocs)
    }
    return {rank: line["monitor"] for rank, line in lines.items()}


def test_the_main_process_of_rank_0_is_killed(ranks: Ranks) -> None:
    # Its monitor serves the store until the others are done; `Job` checks that it then ends.
    with ranks("lost", "killed_by_the_test", nprocs=3) as job:
        job.start_all()
        _ready(job)
        job.kill(0)
        assert job.wait_all() == {0: KILLED, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}
        assert_never_together(job)


def test_a_monitor_process_is_killed_and_replaced(ranks: Ranks) -> None:
    with ranks("lost", "killed_by_the_test", nprocs=2) as job:
        job.start_all()
        monitors = _ready(job)
        os.kill(monitors[1], signal.SIGKILL)
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        after = events(job, 1, "ready")[1]["monitor"]
        assert after != monitors[1]
        assert events(job, 0, "ready")[1]["monitor"] == monitors[0]
        assert "its monitor process" in job.errors(1)


@pytest.mark.parametrize("nprocs", [2, 3])
def test_main_and_monitor_are_killed_together(ranks: Ranks, nprocs: int) -> None:
    with ranks("lost", "killed_by_the_test", nprocs=nprocs) as job:
        job.start_all()
        monitors = _ready(job)
        os.kill(job.pid(1), signal.SIGSTOP)  # so that it does not detect the end of its monitor
        os.kill(monitors[1], signal.SIGKILL)
        job.kill(1)
        assert job.wait_all() == {r: KILLED if r == 1 else 0 for r in range(nprocs)}, errors(job)
        assert views(job) == {0: full(nprocs), 1: full(nprocs - 1)}
        assert "heartbeat timeout" in job.errors(0)


@pytest.mark.parametrize(
    ("how", "pings"), [("stop", "silent"), ("gil", "silent"), ("native", "pings")]
)
def test_a_rank_that_cannot_be_interrupted_is_ended(ranks: Ranks, how: str, pings: str) -> None:
    with ranks("lost", "one_hangs", how, pings, nprocs=3) as job:
        job.start_all()
        codes = job.wait_all()
        assert (codes.pop(0), codes.pop(2)) == (0, 0), errors(job)
        assert codes[1] in (KILLED, -signal.SIGTERM)
        assert views(job) == {0: full(3), 1: full(2)}


def test_a_rank_that_hangs_after_a_ping_is_interrupted_and_takes_part(ranks: Ranks) -> None:
    with ranks("lost", "one_hangs", "python", "pings", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert "soft timeout" in job.errors(1)
        assert_never_together(job)


def test_an_adaptive_timeout_sees_a_hang_and_leaves_long_phases_alone(ranks: Ranks) -> None:
    with ranks("lost", "adaptive") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert len(events(job, 0, "long phase over")) == 1
        assert "rank 1 on" in job.errors(1)
        assert "soft timeout 60" not in job.errors(0)


def test_a_reserve_takes_over(ranks: Ranks) -> None:
    with ranks("lost", "reserve", "fault", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: KILLED, 2: 0}, errors(job)
        assert returned(job) == {0: "0 of 2", 2: "2 of 2"}
        assert views(job) == {0: full(2), 1: full(2)}


def test_a_reserve_that_is_not_needed_returns_none(ranks: Ranks) -> None:
    with ranks("lost", "reserve", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert returned(job) == {0: "0 of 2", 1: "1 of 2", 2: None}
