"""R6 and the hard cases: errors that name the cause; calls in unusual situations."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import pytest

from inprocess.job_output import errors, events, full, returned, views
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "clean up", "kill"])
def test_the_error_names_the_first_cause(ranks: Ranks, how: str) -> None:
    with ranks("misuse", "aborted_by_the_controller", how, nprocs=3) as job:
        job.start_all()
        codes = job.wait_all()
        killed = how == "kill"
        assert codes == {0: 1, 1: -signal.SIGKILL if killed else 1, 2: 1}, errors(job)
        for rank in (0, 2) if killed else (0, 1, 2):
            (raised,) = events(job, rank, "raised")
            assert raised["type"] == "RestartAbort"
            assert "max_iterations" in raised["message"], raised
            (cause,) = events(job, rank, "cause")
            assert cause["rank"] == 1
            assert cause["host"] == socket.gethostname()
            if killed:
                assert "ended without a report" in cause["message"]
            else:
                assert cause["message"] == "KeyError: 'the sample is missing'"
                assert "in _ask_of_rank_1" in cause["traceback"]
            assert "the sample is missing" in job.errors(rank) or killed


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False], ids=["silent", "refused"])
def test_the_port_is_taken_and_the_error_names_it(ranks: Ranks, listens: bool) -> None:
    with socket.socket() as holder, ranks("misuse", "port_taken", nprocs=2) as job:
        holder.bind(("127.0.0.1", job.port))
        if listens:
            holder.listen()
        job.start_all()
        assert job.wait_all() == {0: 1, 1: 1}, errors(job)
        for rank in (0, 1):
            assert not events(job, rank, "must not be entered")
            (raised,) = events(job, rank, "raised")
            assert raised["type"] in ("StoreError", "RankTimeout")
            assert f"127.0.0.1:{job.port}" in raised["message"]


@pytest.mark.slow
def test_the_store_cannot_be_reached(ranks: Ranks) -> None:
    with ranks("misuse", "port_taken", nprocs=2) as job:
        job.start(1)  # without rank 0, which would serve the store
        assert job.wait_all() == {1: 1}
        (raised,) = events(job, 1, "raised")
        assert raised["type"] == "RankTimeout"
        assert f"127.0.0.1:{job.port}" in raised["message"]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_rank_fails_while_its_call_comes_up(ranks: Ranks, nprocs: int) -> None:
    # Its monitor, which serves the store, ends when the others are done: `Job` checks that.
    with ranks("misuse", "fails_coming_up", nprocs=nprocs) as job:
        job.start_all()
        assert job.wait_all() == {0: 1} | dict.fromkeys(range(1, nprocs), 0), errors(job)
        assert events(job, 0, "raised")[0]["message"] == "not prepared"
        assert returned(job) == dict.fromkeys(range(1, nprocs), 1)


def test_calls_nested_repeated_and_with_a_group_there_already(ranks: Ranks) -> None:
    with ranks("misuse", "nested_and_repeated") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        for rank in (0, 1):
            assert [x["value"] for x in events(job, rank, "returned")] == [[rank, 1]] * 3
            assert len(events(job, rank, "nested")) == 6
            assert "do not nest" in events(job, rank, "nested")[0]["message"]
            assert "initialized already" in events(job, rank, "initialized")[0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_call_leaves_no_group_and_no_store_behind(ranks: Ranks, nprocs: int) -> None:
    with ranks("misuse", "calls_in_sequence", nprocs=nprocs) as job:
        job.start_all()
        assert job.wait_all() == dict.fromkeys(range(nprocs), 0), errors(job)
        for rank in range(nprocs):
            results = [line["value"] for line in events(job, rank, "result")]
            assert results == [[nprocs, 1], nprocs, nprocs, [nprocs, 1]]


@pytest.mark.slow
def test_a_function_destroys_its_groups(ranks: Ranks) -> None:
    """Without the references that are kept, it soon waits for a thread that waits for the GIL."""
    with ranks("misuse", "destroys_its_groups", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == dict.fromkeys(range(3), 0), errors(job)


def test_one_process_without_a_launcher(ranks: Ranks) -> None:
    with ranks("misuse", "alone", nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, errors(job)
        assert returned(job) == {0: [0, 1]}


@pytest.mark.parametrize("how", ["in_another_thread", "signal_taken"])
def test_an_asynchronous_exception_where_no_signal_can_be_used(ranks: Ranks, how: str) -> None:
    with ranks("misuse", how) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        for rank in (0, 1):
            if how == "signal_taken":
                assert events(job, rank, "signals")[0]["got"] == [signal.SIGURG]
            else:
                assert events(job, rank, "thread")[0]["results"] == [rank]


def test_connections_that_are_not_torchs_stay_open(ranks: Ranks) -> None:
    with ranks("misuse", "foreign_connection") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        for rank in (0, 1):
            heard = [line["text"] for line in events(job, rank, "heard")]
            assert heard == ["still here"] * 2 + ["afterwards"] * 2


@pytest.mark.slow
def test_the_fork_of_the_monitor_amid_busy_threads(ranks: Ranks) -> None:
    with ranks("misuse", "busy_threads") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert len(events(job, 0, "returned")) == 20
