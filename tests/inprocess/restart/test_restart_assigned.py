"""Rank assignments that need to know something of the other ranks, on real ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from inprocess.job_output import errors, events, full, returned, said, views
from procs import Job

Ranks = Callable[..., Job]
KILLED = -signal.SIGKILL


@pytest.mark.slow
def test_a_tree_has_a_reserve_that_a_replacement_joins(ranks: Ranks) -> None:
    with ranks("assigned", "with_a_reserve", nprocs=3) as job:
        job.start_all()
        job.wait_for_line(1, said("entered", iteration=1))
        assert views(job)[0] == full(2)
        job.wait(0)
        job.start(0, env={"OUTLAST_REPLACEMENT": "1"})
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        entered = {
            r: [(x["iteration"], x["rank"]) for x in events(job, r, "entered")] for r in (1, 2)
        }
        assert entered == {1: [(1, 0), (2, 0)], 2: [(0, 1), (1, 1), (2, 1)]}
        assert returned(job) == {0: None, 1: 0, 2: 1}


@pytest.mark.slow
def test_the_rest_of_a_host_that_lost_a_rank_leaves(ranks: Ranks) -> None:
    with ranks("assigned", "whole_hosts", nprocs=4) as job:
        job.start_all()
        assert job.wait_all() == {0: 1, 1: KILLED, 2: 0, 3: 0}, errors(job)
        (raised,) = events(job, 0, "raised")
        assert raised["type"] == "RankDiscarded"
        assert "its group 'host0' has 1 healthy ranks" in raised["message"]
        assert views(job) == {0: full(4), 1: full(2)}
