"""R1 and R2 on real processes: after a fault of any kind all survivors restart together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.job_output import (
    assert_never_together,
    errors,
    events,
    first_and_last,
    full,
    returned,
    said,
    views,
)
from outlast.events.run_folders import load
from outlast.events.types import Decided
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.parametrize(
    ("fault", "code"), [("exception", 0), ("asked", 0), ("exit", 3), ("kill", -signal.SIGKILL)]
)
def test_all_survivors_go_on_with_one_view(
    ranks: Ranks, fault: str, code: int, tmp_path: Path
) -> None:
    survivors = 2 if code else 3
    log = {"OUTLAST_EVENTS_DIR": str(tmp_path / "events")}
    with ranks("faults", "one_fails", fault, nprocs=3, env=log) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: code, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(survivors)}
        met = [line["count"] for line in events(job, 0, "met")]
        assert met in ([3, survivors], [survivors])  # rank 1 may fail before rank 0 has said so
        assert_never_together(job)
        assert returned(job) == ({0: 0, 1: 1, 2: 2} if not code else {0: 0, 2: 1})
    decided = [event for event in load(tmp_path / "events") if isinstance(event, Decided)]
    assert {event.member for event in decided} == ({0, 1} if not code else {0, 2})
    for event in decided:
        assert event.cause is not None
        assert (event.iteration, event.cause.member, event.cause.rank) == (0, 1, 1)
        assert event.lost == ([] if not code else [(1, 1)])
        assert (event.size, event.members, event.joined, event.ends) == (3, survivors, [], False)
        assert event.reached in ("all arrived", "a loss")


def test_nobody_goes_on_before_everyone_has_left(ranks: Ranks) -> None:
    with ranks("faults", "one_leaves_late", nprocs=3) as job:
        job.start_all()
        for rank in (0, 1):
            job.wait_for_line(rank, said("finalized", iteration=0))
        time.sleep(0.3)  # no event reports a rank that stays; a broken barrier would pass sooner
        job.send(2, signal.SIGUSR1)
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert_never_together(job)


def test_all_ranks_fail_at_the_same_instant(ranks: Ranks) -> None:
    # Repeated, since some timings are rare: gloo may lose a send whose peer has already ended.
    with ranks("faults", "all_fail_at_once", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {k: full(3) for k in range(41)}
        assert_never_together(job)


def test_a_rank_that_has_returned_takes_part_again(ranks: Ranks) -> None:
    with ranks("faults", "one_has_returned", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert returned(job) == {0: 10, 1: 11, 2: 12}


def test_the_last_rank_left_finishes_alone(ranks: Ranks) -> None:
    with ranks("faults", "all_but_one_die", nprocs=3) as job:
        job.start_all()
        killed = -signal.SIGKILL
        assert job.wait_all() == {0: killed, 1: 0, 2: killed}, errors(job)
        assert first_and_last(job) == [full(3), full(1)]
        assert_never_together(job)


def test_a_function_without_process_groups(ranks: Ranks) -> None:
    with ranks("faults", "no_groups") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert_never_together(job)


def test_a_swallowed_interrupt_is_repeated_and_the_log_says_where(ranks: Ranks) -> None:
    with ranks("faults", "swallows") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        swallowed = [line["type"] for line in events(job, 0, "swallowed")]
        assert swallowed == ["RankShouldRestart"] * 3
        warnings = [x for x in job.errors(0).splitlines() if "caught the interrupt" in x]
        assert any("faults.py" in x and " swallows" in x for x in warnings), warnings
