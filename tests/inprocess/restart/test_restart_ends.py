"""Functions that end in special ways, and calls in sequence."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import outlast
from inprocess.job_output import errors, events, full, returned, views
from outlast.events.report import load
from outlast.events.types import Fault
from procs import Job, free_port

Ranks = Callable[..., Job]


@pytest.mark.slow
def test_a_handler_that_exits_in_order_under_the_hard_timeout_is_not_killed(ranks: Ranks) -> None:
    # The grace time exceeds the test's timeout: only the exit can end the rank.
    with ranks("ends", "exits_on_sigterm", nprocs=2) as job:
        job.start_all()
        assert job.wait_all(45) == {0: 0, 1: 7}, errors(job)
        assert views(job) == {0: full(2), 1: full(1)}
        assert events(job, 1, "raised")[0]["type"] == "SystemExit"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 5), ("return", 0)])
def test_a_forked_child_that_leaves_the_function_is_no_member(
    ranks: Ranks, how: str, code: int
) -> None:
    with ranks("ends", "forks", how, nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert events(job, 1, "child")[0]["code"] == code
        assert views(job) == {0: full(2)}
        assert returned(job) == {0: 0, 1: 1}
        assert ("ValueError: a fault of the child" in job.errors(1)) == (how == "raise")


def test_an_exception_made_of_the_interrupt_is_no_fault(ranks: Ranks, tmp_path: Path) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("ends", "wraps_the_interrupt", nprocs=2, env=env) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
    faults = [event for event in load(logs) if isinstance(event, Fault)]
    assert [(fault.rank, fault.cause) for fault in faults] == [(0, "OSError: the fault")]


@pytest.mark.slow
def test_an_atomic_block_that_outlasts_the_barrier_ends_its_rank_alone(ranks: Ranks) -> None:
    with ranks("ends", "long_atomic", nprocs=3) as job:
        job.start_all()
        codes = job.wait_all()
        assert codes == {0: 0, 1: -signal.SIGTERM, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("exit", 3)])
def test_a_rank_that_connects_to_a_store_that_has_gone_is_not_stuck(
    ranks: Ranks, how: str, code: int
) -> None:
    with ranks("ends", "connects_when_the_store_is_gone", how, nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: code, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


def test_the_file_of_an_earlier_run_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "store"
    with ranks("ends", "on_a_file", str(file), nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert returned(job) == {0: 0, 1: 1}
    with ranks("ends", "on_a_file", str(file), nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 1, 1: 1}, errors(job)
        for rank in (0, 1):
            (raised,) = events(job, rank, "raised")
            assert raised["type"] == "StoreError"
            assert f"{file} holds a job that has completed" in raised["message"]


def test_a_daemon_without_standard_streams(ranks: Ranks, tmp_path: Path) -> None:
    result = tmp_path / "result"
    with ranks("ends", "without_standard_streams", str(result), nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, errors(job)
        assert result.read_text() == "1"


@pytest.mark.slow
def test_a_call_gives_back_its_descriptors_without_a_garbage_collection(ranks: Ranks) -> None:
    with ranks("ends", "many_calls", nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, errors(job)
        (line,) = events(job, 0, "held")
        assert len(set(line["descriptors"][2:])) == 1, line


@pytest.mark.slow
def test_a_function_is_called_again_after_an_abort_with_the_same_port(ranks: Ranks) -> None:
    with ranks("ends", "called_again_after_an_abort", str(free_port())) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert returned(job) == {0: 0, 1: 1}
        for rank in (0, 1):
            raised = [(line["type"], line["message"]) for line in events(job, rank, "raised")]
            assert [kind for kind, _ in raised] == ["RestartAbort"] * 5
            assert all(f"call {n}" in message for n, (_, message) in enumerate(raised)), raised


def test_the_log_tells_each_step_and_the_monitor_its_start_and_end(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ranks("ends", "logs", str(tmp_path)) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
    for rank in (0, 1):
        text = job.errors(rank)
        log = [line for line in text.splitlines() if line.startswith("LOG outlast.inprocess")]
        failed = rank == 1
        steps = [
            f"rank {rank} of 2: call 0 begins",
            f"iteration 0: assigned rank {rank} of 2, 2 active",
            f"rank {rank}: waiting at the barrier start",
            f"rank {rank}: health check after None",
            f"rank {rank}: iteration 0: calling the function",
            f"rank {rank}: the iteration is over (restart): abort",
            f"rank {rank}: iteration 0: finalize",
            f"rank {rank}: waiting at the barrier term",
            "restart of iteration 0: rank 1 on ",
            f"rank {rank}: iteration 1: calling the function",
            f"rank {rank}: iteration 1: the function returned",
            f"rank {rank}: the call is complete on all ranks",
        ]
        at = [next((n for n, line in enumerate(log) if step in line), -1) for step in steps]
        assert -1 not in at, (steps[at.index(-1)], text)
        assert at == sorted(at), text
        own = "recording a fault: ValueError: a planned fault" if failed else "interrupting the fun"
        assert own in text
        (monitor,) = {line["pid"] for line in events(job, rank, "monitor")}
        main = events(job, rank, "entered")[0]["pid"]
        lines = (tmp_path / f"monitor-{rank}.log").read_text().splitlines()
        name = f"monitor process {monitor} of process {main}"
        for line, end in (
            (lines[0], f"{name}, rank {rank} of 2: start"),
            (lines[-1], f"{name}: end"),
        ):
            time, _, words = line.partition(" ")
            assert words == end
            assert datetime.datetime.fromisoformat(time).tzinfo


def test_hooks_run_once_at_the_end_and_change_nothing(ranks: Ranks) -> None:
    with ranks("ends", "hooks", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 4}, errors(job)
        assert returned(job) == {0: 0}
        ends = ("completion", "terminate")
        told = {
            r: [(x["event"], x["rank"], x["iteration"]) for x in job.lines(r) if x["event"] in ends]
            for r in (0, 1)
        }
        assert told == {0: [("completion", 0, 1)], 1: [("terminate", 1, 0)]}
        assert "Completes raised an exception" in job.errors(0)
        assert "Terminates raised an exception" in job.errors(1)


@pytest.mark.parametrize("how", ["abort", "excluded"])
def test_the_user_sees_the_own_frames_once(ranks: Ranks, how: str) -> None:
    with ranks("ends", "leaves", how, nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 1 if how == "abort" else 0, 1: 1}, errors(job)
        own, other = job.errors(1), job.errors(0)
    assert own.count("Traceback") == own.count('("a planned end")') == 1
    assert own.rstrip().endswith(": a planned end")
    package = os.path.dirname(outlast.__file__)
    library = [line for line in own.splitlines() if package in line]
    assert len(library) == 1, own  # the wrapper, which the user has called
    assert '("a planned end")' not in other
    if how == "abort":
        assert other.rstrip().endswith("rank 1 ended the job: RestartAbort: a planned end")
        assert events(job, 0, "cause")[0]["message"] == "RestartAbort: a planned end"
