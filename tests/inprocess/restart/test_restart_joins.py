"""Membership: a new process replaces a dead one, by the grow policy."""

from __future__ import annotations

import signal
from collections.abc import Callable

from inprocess.job_output import assert_never_together, errors, events, full, said, views
from procs import Job

Ranks = Callable[..., Job]
REPLACEMENT = {"OUTLAST_REPLACEMENT": "1"}


def _kill_rank_1(job: Job) -> None:
    job.start_all()
    for rank in range(3):
        job.wait_for_line(rank, said("ready", iteration=0))
    job.kill(1)


def _last_rank(job: Job) -> int:
    return int(events(job, 1, "entered")[-1]["rank"])


def test_a_newcomer_is_taken_in_at_once(ranks: Ranks) -> None:
    with ranks("joins", "replaced", "AT_ONCE", nprocs=3) as job:
        _kill_rank_1(job)
        job.wait_for_line(0, said("ready", size=2))
        job.wait_for_line(2, said("ready", size=2))
        job.start(1, env=REPLACEMENT)
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        seen = views(job)
        assert seen[max(seen)] == full(3)
        assert _last_rank(job) in (1, 2)  # after ShiftRanks had closed the gap, at the end
        assert_never_together(job)


def test_a_newcomer_that_is_quick_gets_the_rank_of_the_dead_one(ranks: Ranks) -> None:
    with ranks("joins", "awaited", "100", nprocs=3) as job:
        _kill_rank_1(job)
        job.start(1, env=REPLACEMENT)
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert _last_rank(job) == 1
        assert_never_together(job)


def test_a_restart_that_is_held_goes_on_smaller_in_the_end(ranks: Ranks) -> None:
    with ranks("joins", "awaited", "1", nprocs=3) as job:
        _kill_rank_1(job)
        assert job.wait_all() == {0: 0, 1: -signal.SIGKILL, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


def test_a_newcomer_waits_for_the_next_restart(ranks: Ranks) -> None:
    with ranks("joins", "replaced", "AT_NEXT_RESTART", nprocs=3) as job:
        _kill_rank_1(job)
        job.wait_for_line(0, said("ready", size=2))
        job.start(1, env=REPLACEMENT)
        job.wait_for_line(1, said("asks"))
        job.send(0, signal.SIGUSR1)
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2), 2: full(3)}
        assert "the next restart" in job.errors(0)
        assert_never_together(job)


def test_a_job_that_takes_nobody_in_says_so(ranks: Ranks) -> None:
    with ranks("joins", "replaced", "NEVER", nprocs=3) as job:
        _kill_rank_1(job)
        job.wait_for_line(0, said("ready", size=2))
        job.start(1, env=REPLACEMENT)
        assert job.wait(1) == 1
        job.send(0, signal.SIGUSR1)
        assert job.wait_all() == {0: 0, 1: 1, 2: 0}, errors(job)
        (raised,) = events(job, 1, "raised")
        assert raised["type"] == "RestartError"
        assert "rank 1 was taken before" in raised["message"]
        assert views(job) == {0: full(3), 1: full(2)}
