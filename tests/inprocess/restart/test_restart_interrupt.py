"""R3 on real processes: an interrupt is raised wherever the rank blocks, and never in atomic()."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from inprocess.job_output import assert_never_together, errors, events, full, returned, said, views
from procs import Job

Ranks = Callable[..., Job]


def test_every_way_to_block_is_interrupted(ranks: Ranks) -> None:
    # The job must end: only the interrupt ends any of these waits within the half hour of a
    # group's timeout.
    with ranks("blocked", "one_after_another") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        ways = returned(job)[0]
        assert len(ways) >= 13
        assert [line["way"] for line in events(job, 0, "blocks")] == ways
        assert not events(job, 0, "was not interrupted")
        assert views(job) == {k: full(2) for k in range(len(ways) + 1)}
        assert_never_together(job)


def test_a_rank_is_killed_amid_a_transfer(ranks: Ranks) -> None:
    with ranks("blocked", "amid_a_transfer", nprocs=3) as job:
        job.start_all()
        for rank in range(3):
            job.wait_for_line(rank, said("under way"))
        job.kill(1)
        assert job.wait_all() == {0: 0, 1: -signal.SIGKILL, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


def test_a_rank_is_killed_amid_a_send_that_the_main_thread_waits_for(ranks: Ranks) -> None:
    # The requests of the interrupt wake the thread again and again: it must be recognized as
    # blocked all the same.
    with ranks("blocked", "amid_a_send") as job:
        job.start_all()
        job.wait_for_line(0, said("asleep"))
        job.kill(1)
        assert job.wait_all() == {0: 0, 1: -signal.SIGKILL}, errors(job)
        assert views(job) == {0: full(2), 1: full(1)}


def test_a_peer_dies_while_the_others_wait_for_it_to_connect(ranks: Ranks) -> None:
    with ranks("blocked", "peer_dies_before_it_connects", nprocs=3) as job:
        job.start_all()
        job.wait_for_line(1, said("waits"))
        for rank in (0, 2):
            job.wait_for_line(rank, said("entered", iteration=0))
        job.kill(1)
        assert job.wait_all() == {0: 0, 1: -signal.SIGKILL, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


def test_atomic_is_never_interrupted_and_the_termination_waits(ranks: Ranks) -> None:
    with ranks("blocked", "atomic") as job:
        job.start_all()
        job.wait_for_line(1, said("left", iteration=0))
        for part in ("inner done", "outer done"):
            time.sleep(0.2)  # no event reports the absence of an interrupt
            job.send(0, signal.SIGUSR1)
            job.wait_for_line(0, said(part))
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        order = [line["event"] for line in job.lines(0)]
        assert order.index("inner done") < order.index("outer done") < order.index("abort")
        assert "entered again" not in order
        assert "refused" in order
        assert views(job) == {0: full(2), 1: full(2)}
        assert_never_together(job)
