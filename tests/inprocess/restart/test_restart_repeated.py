"""Faults that come back end the job, with the cause on top and exit code 93."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable

import pytest

from inprocess.job_output import errors, events, full, returned, said, views
from procs import Job

Ranks = Callable[..., Job]


def _assert_stopped(job: Job, cause: str, why: str) -> None:
    """Both ranks ended with the same error about rank 1, and only rank 1 shows the traceback."""
    assert job.wait_all() == {0: 93, 1: 93}, errors(job)
    for rank in (0, 1):
        (raised,) = events(job, rank, "raised")
        assert raised["type"] == "UnrecoverableFault"
        assert f"rank 1 on {socket.gethostname()}: {cause}" in raised["message"]
        assert why in raised["message"]
        (found,) = events(job, rank, "cause")
        assert found["rank"] == 1
        assert cause in found["traceback"]
        assert ("Traceback" in job.errors(rank)) == (rank == 1), errors(job)
    said = job.errors(1).rpartition("Traceback")[2]
    assert said.index(cause) < said.index(f"rank 1 on {socket.gethostname()}") < said.index(why)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause", "why"),
    [
        ("name", "NameError: name 'undefined_name'", "before the first step or second ping"),
        ("import", "ModuleNotFoundError: No module named", "before the first step or second ping"),
        ("argument", "ValueError: limit must be positive", "every restart would raise again"),
        ("folder", "FolderUnusable: ", "every restart would raise again"),
    ],
)
def test_what_no_restart_fixes_ends_the_job_at_once(
    ranks: Ranks, how: str, cause: str, why: str
) -> None:
    with ranks("repeats", "cannot_work", how) as job:
        job.start_all()
        _assert_stopped(job, cause, why)
        assert views(job) == {0: full(2)}


def test_a_breakpoint_on_a_rank_without_a_terminal_ends_the_job_and_says_how_to_debug(
    ranks: Ranks,
) -> None:
    with ranks("repeats", "cannot_work", "breakpoint") as job:
        job.start_all()
        assert job.wait_all() == {0: 93, 1: 93}, errors(job)
        assert views(job) == {0: full(2)}
        assert "bdb.BdbQuit" in job.errors(1)
        for rank in (0, 1):
            (raised,) = events(job, rank, "raised")
            assert "run the script as one process in a terminal" in raised["message"]
        assert "run the script as one process in a terminal" in job.errors(1)


@pytest.mark.parametrize("how", ["nothing", "pings", "steps"])
def test_three_equal_faults_without_progress_end_the_job(ranks: Ranks, how: str) -> None:
    with ranks("repeats", "comes_back", how) as job:
        job.start_all()
        _assert_stopped(job, "ValueError: a planned fault at ", "3 equal faults without progress")
        assert views(job) == {0: full(2), 1: full(2), 2: full(2)}
        # Each of the equal ones after the first is told in one line, which names its place.
        assert job.errors(1).count("Traceback") == 1
        assert "again ValueError" in job.errors(1)


@pytest.mark.parametrize("how", ["pings", "steps"])
def test_equal_faults_with_progress_restart_without_a_pause(ranks: Ranks, how: str) -> None:
    with ranks("repeats", "progresses", how, "fault") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {k: full(2) for k in range(6)}
        told = r"completed after 5 restarts: 5 x OSError at repeats\.py:\d+ \(rank 1\)$"
        assert len(re.findall(told, job.errors(0), re.M)) == 1, errors(job)
        assert "completed after" not in job.errors(1)


def test_a_mistake_in_the_program_ends_the_job_the_third_time_whatever_progress(
    ranks: Ranks,
) -> None:
    with ranks("repeats", "progresses", "steps", "mistake") as job:
        job.start_all()
        why = "a mistake in the program that came back, 3 x KeyError at repeats.py:"
        _assert_stopped(job, "KeyError: 'a planned fault'", why)
        assert views(job) == {k: full(2) for k in range(3)}
        (raised,) = events(job, 0, "raised")
        steps = "rank 1 after step 1, rank 1 after step 2, rank 1 after step 3"
        assert steps in raised["message"]
        told = r"ended after 2 restarts: 2 x KeyError at repeats\.py:\d+ \(rank 1\)$"
        assert len(re.findall(told, job.errors(0), re.M)) == 1, errors(job)


def test_a_mistake_is_counted_over_all_ranks_and_their_replacements(ranks: Ranks) -> None:
    with ranks("repeats", "mistakes_on_all_ranks") as job:
        job.start_all()
        assert job.wait(1) == -signal.SIGKILL, errors(job)
        job.start(1)
        assert job.wait_all() == {0: 93, 1: 93}, errors(job)
        (raised,) = events(job, 0, "raised")
        assert re.search(r"3 x KeyError at repeats\.py:\d+: rank 0 after", raised["message"])
        assert "1 x died (rank 1)" in job.errors(0)


def test_a_retry_controller_decides_alone(ranks: Ranks) -> None:
    with ranks("repeats", "is_controlled") as job:
        job.start_all()
        assert job.wait_all() == {0: 1, 1: 1}, errors(job)
        assert set(views(job)) == set(range(6))  # a rank may learn of the fault before it enters
        assert events(job, 0, "raised")[0]["type"] == "RestartAbort"


def test_a_rank_that_leaves_ends_the_pause_of_the_others(ranks: Ranks) -> None:
    # The pause is longer than the test's net: only its early end lets rank 0 return.
    with ranks("repeats", "left_in_the_pause") as job:
        job.start_all()
        for rank in (0, 1):
            job.wait_for_line(rank, said("pause"))
        job.send(1, signal.SIGINT)
        assert job.wait(0, 45) == 0, errors(job)
        assert job.wait(1) == -signal.SIGINT, errors(job)
        assert returned(job) == {0: 1}
