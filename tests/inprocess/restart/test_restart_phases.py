"""R5 on real processes: a fault in any phase ends in a restart, or in a clear error there."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from inprocess.job_output import (
    assert_never_together,
    errors,
    events,
    first_and_last,
    full,
    said,
    views,
)
from procs import Job

Ranks = Callable[..., Job]
KILLED = -signal.SIGKILL


def test_initialize_raises_and_everyone_goes_on(ranks: Ranks) -> None:
    with ranks("phases", "fails_in_phase", "initialize", "raise", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        seen = views(job)
        assert seen[0] == seen[2] == full(3)  # some may have entered at iteration 1
        assert "initialize: OSError: a planned fault in initialize" in job.errors(1)
        assert_never_together(job)


def test_a_health_check_that_fails_once_costs_a_restart_and_no_rank(ranks: Ranks) -> None:
    with ranks("phases", "fails_the_first_check", "once") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job)[1] == full(2)
        failure = "OSError('the device does not answer')"
        checked = [(x["iteration"], x["train_ex"]) for x in events(job, 1, "checked")]
        assert checked == [(0, "None"), (0, failure), (1, "None")]
        assert "OSError: the device does not answer" in job.errors(1)


def test_the_second_health_check_decides_whether_the_rank_stays(ranks: Ranks) -> None:
    with ranks("phases", "fails_the_first_check", "always") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 1}, errors(job)
        (raised,) = events(job, 1, "raised")
        assert raised["type"] == "HealthCheckError"
        assert "OSError: the device does not answer" in raised["message"]
        assert not events(job, 1, "entered")
        assert views(job)[max(views(job))] == full(1)


def test_abort_raises_and_the_restart_goes_on(ranks: Ranks) -> None:
    with ranks("phases", "fails_in_phase", "abort", "raise", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert "a planned fault in abort" in job.errors(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("finalize", "OSError"),
        ("health_check", "HealthCheckError"),
        ("assignment", "OSError"),
        ("filter", "OSError"),
    ],
)
def test_a_phase_raises_and_the_others_go_on(ranks: Ranks, phase: str, error: str) -> None:
    with ranks("phases", "fails_in_phase", phase, "raise", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 1, 2: 0}, errors(job)
        (raised,) = events(job, 1, "raised")
        assert raised["type"] == error
        assert f"a planned fault in {phase}" in raised["message"]
        assert first_and_last(job) == [full(3), full(2)]
        assert_never_together(job)


@pytest.mark.parametrize("phase", ["initialize", "finalize", "health_check", "abort"])
def test_a_rank_is_killed_in_a_phase(ranks: Ranks, phase: str) -> None:
    with ranks("phases", "fails_in_phase", phase, "die", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: KILLED, 2: 0}, errors(job)
        assert first_and_last(job) == [full(3), full(2)]
        assert_never_together(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        pytest.param("initialize", "hang", marks=pytest.mark.slow),
        pytest.param("finalize", "hang", marks=pytest.mark.slow),
        pytest.param("abort", "hang", marks=pytest.mark.slow),
        pytest.param("finalize", "loop", marks=pytest.mark.slow),
        ("health_check", "loop"),
    ],
)
def test_a_phase_hangs_and_its_monitor_ends_the_rank(ranks: Ranks, phase: str, how: str) -> None:
    with ranks("phases", "fails_in_phase", phase, how, nprocs=3) as job:
        job.start_all()
        codes = job.wait_all()
        assert codes in ({0: 0, 1: -signal.SIGTERM, 2: 0}, {0: 0, 1: KILLED, 2: 0}), errors(job)
        assert first_and_last(job) == [full(3), full(2)]
        assert "hard timeout" in job.errors(0)


def test_a_rank_is_killed_while_it_waits_at_the_barrier(ranks: Ranks) -> None:
    with ranks("phases", "dies_at_the_barrier", nprocs=3) as job:
        job.start_all()
        for rank in range(3):
            job.wait_for_line(rank, said("finalized", iteration=0))
        job.kill(1)
        job.send(2, signal.SIGUSR1)
        assert job.wait_all() == {0: 0, 1: KILLED, 2: 0}, errors(job)
        assert first_and_last(job) == [full(3), full(2)]


def test_a_rank_is_killed_before_it_registers(ranks: Ranks) -> None:
    with ranks("phases", "dies_before_it_registers", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: KILLED, 2: 0}, errors(job)
        seen = views(job)
        assert seen[max(seen)] == full(2)
        # No rank has entered the function; each aborts and finalizes all the same.
        assert min(seen) == 1
        for rank in (0, 2):
            phases = [(x["phase"], x["iteration"]) for x in events(job, rank, "phase")]
            assert [phase for phase in phases if phase[0] != "initialize"] == [
                ("abort", 0),
                ("finalize", 0),
            ]
