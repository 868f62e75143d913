"""C3 and C4 on real processes: a call is finalized only if all ranks have finished it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_checkpoint.calls.work import CAUSES, Gate
from procs import Job

Ranks = Callable[..., Job]
NET_S = 60.0


@pytest.fixture(params=["fork", "persistent"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def said(job: Job, rank: int, event: str, field: str) -> list[Any]:
    return [line[field] for line in job.lines(rank) if line["event"] == event]


def raised(job: Job, rank: int) -> list[str]:
    return said(job, rank, "raised", "message")


def ends_well(job: Job) -> None:
    assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(job.nprocs)))


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_nothing_is_finalized_before_every_rank_has_finished(
    ranks: Ranks, kind: str, store: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    where = [str(tmp_path / "store")] if store == "file" else []
    with ranks("calls", "goes_well", kind, str(tmp_path), *where, nprocs=3) as job:
        job.start_all()
        gate.arrived()
        for rank in range(3):
            job.wait_for_line(rank, lambda line: line["event"] == "looked")
            assert said(job, rank, "finalized", "index") == []
        gate.open()
        ends_well(job)
        for rank in range(3):
            assert said(job, rank, "looked", "done") == [[]]
            assert said(job, rank, "done", "done") == [[0, 1]]
            assert said(job, rank, "finalized", "index") == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exception", "exit", "os._exit", "kill"])
def test_a_failure_on_one_rank_is_an_error_on_all(ranks: Ranks, kind: str, how: str) -> None:
    with ranks("calls", "one_fails", kind, how, nprocs=3) as job:
        job.start_all()
        ends_well(job)
        for rank in range(3):
            (message,) = raised(job, rank)
            assert "call 0 (async_checkpoint.calls.work.end_by) failed on rank 1 on" in message
            assert CAUSES[how] in message
            assert ("in end_by" in message) == (how in ("exception", "exit"))
            assert said(job, rank, "finalized", "index") == [1]
            assert said(job, rank, "returned", "value") == [[1]]


def test_a_different_order_is_caught_on_both_ranks(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "different_order", kind) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            messages = raised(job, rank)
            assert len(messages) == 2
            for message in messages:
                assert "scheduled in different order" in message
                assert "part" in message
                assert "other_part" in message
            assert said(job, rank, "finalized", "index") == [2]


def test_a_rank_that_cannot_schedule_fails_the_call_for_all(ranks: Ranks) -> None:
    with ranks("calls", "one_cannot_schedule", "persistent") as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            (message,) = raised(job, rank)
            assert "takes cannot be given to a persistent worker" in message
            assert said(job, rank, "finalized", "index") == [1]
        assert said(job, 0, "raised", "type") == ["AsyncCallError"]
        assert said(job, 1, "raised", "type") == ["TypeError"]


def test_a_finalize_function_that_fails_on_one_rank(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "finalize_fails_on_one", kind) as job:
        job.start_all()
        ends_well(job)
        assert raised(job, 0) == []
        (message,) = raised(job, 1)
        assert "one_fails of background call 0" in message
        assert "OSError: the link is there already" in message
        assert said(job, 0, "finalized", "index") == [0, 1]
        assert said(job, 1, "finalized", "index") == [1]


def test_a_child_ends_with_its_rank(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with ranks("calls", "main_is_killed", kind, str(tmp_path)) as job:
        job.start_all()
        child = os.pidfd_open(gate.arrived())
        for rank in (1, 0):
            job.wait_for_line(rank, lambda line: line["event"] == "scheduled")
            job.kill(rank)
        poll = select.poll()
        poll.register(child, select.POLLIN)
        assert poll.poll(NET_S * 1000)
        os.close(child)
        assert raised(job, 0) == []


def test_an_abort_drops_the_call_for_all(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    gate, go = Gate(tmp_path), Gate(tmp_path, "abort")
    with ranks("calls", "aborts", kind, str(tmp_path)) as job:
        job.start_all()
        gate.arrived()
        go.arrived()
        go.open()
        ends_well(job)
        (message,) = raised(job, 1)
        assert "call 0 (async_checkpoint.calls.work.part) failed on rank 0 on" in message
        assert "the queue was aborted" in message
        assert said(job, 0, "finalized", "index") == said(job, 1, "finalized", "index") == []


def test_a_wait_ends_when_the_store_is_lost(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with ranks("calls", "store_is_lost", kind, str(tmp_path)) as job:
        job.start_all()
        gate.arrived()
        job.wait_for_line(1, lambda line: line["event"] == "scheduled")
        job.kill(0)
        assert job.wait(1) == 0, job.errors(1)
        assert said(job, 1, "raised", "type") == ["StoreError"] * 2
        assert said(job, 1, "finalized", "index") == []


def test_close_gives_up_in_time_on_all_ranks(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    Gate(tmp_path)
    with ranks("calls", "closes_in_time", kind, str(tmp_path)) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            (message,) = raised(job, rank)
            assert "not finished within the 0:00:00.05" in message
            assert 1 not in said(job, rank, "finalized", "index")


def test_in_step_all_ranks_finalize_at_the_same_check(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with ranks("calls", "in_step", kind, str(tmp_path), nprocs=3) as job:
        job.start_all()
        gate.arrived()
        for rank in range(3):
            job.wait_for_line(rank, lambda line: line["event"] == "check")
        gate.open()
        ends_well(job)
        checks = [
            [line for line in job.lines(rank) if line["event"] == "check"] for rank in range(3)
        ]
        assert checks[0] == checks[1] == checks[2]
        assert checks[0][0]["done"] == []
        assert [i for line in checks[0] for i in line["done"]] == [0, 1]


def test_ranks_without_a_part_and_ranks_that_look_at_other_times(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "uneven", kind) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            assert said(job, rank, "finalized", "index") == [0, 1, 2, 3]


def test_no_key_stays_in_the_store(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "leaves_no_keys", kind) as job:
        job.start_all()
        ends_well(job)
        assert said(job, 0, "keys", "before") == said(job, 0, "keys", "after")
        assert len(raised(job, 1)) == 3


def test_queues_of_several_groups(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "on_subgroups", kind, nprocs=3) as job:
        job.start_all()
        ends_well(job)
        for rank in range(3):
            (message,) = raised(job, rank)
            assert "failed on rank 2" in message
            assert said(job, rank, "returned", "value") == ([[0]] * (1 if rank == 2 else 2))


def test_groups_that_are_made_anew(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "many_groups", kind) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            assert sum(line["event"] == "finalized" for line in job.lines(rank)) == 3


def test_a_caller_is_done_when_all_ranks_are(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with ranks("calls", "with_a_caller", kind, str(tmp_path)) as job:
        job.start_all()
        gate.arrived()
        for rank in range(2):
            job.wait_for_line(rank, lambda line: line["event"] == "all")
        gate.open()
        ends_well(job)
        assert said(job, 0, "own", "done") == [True]
        for rank in range(2):
            assert said(job, rank, "all", "done") == [False, True]
            (message,) = raised(job, rank)
            assert "background call" in message
            assert "on rank 1" in message
            assert said(job, rank, "returned", "value") == [True]


@pytest.mark.parametrize("how", ["exception", "exit 0"])
def test_in_the_foreground(ranks: Ranks, how: str) -> None:
    with ranks("calls", "in_the_foreground", how) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            assert said(job, rank, "finalized", "index") == ([0] if how == "exit 0" else [])
        if how == "exception":
            assert said(job, 0, "raised", "type") == ["AsyncCallError"]
            assert said(job, 1, "raised", "type") == ["ValueError"]
            assert "failed on rank 1" in raised(job, 0)[0]


@pytest.mark.slow
def test_a_function_of_the_program_itself(ranks: Ranks, kind: str) -> None:
    with ranks("calls", "of_this_program", kind) as job:
        job.start_all()
        ends_well(job)
        for rank in range(2):
            assert said(job, rank, "worked", "rank") == [rank]
            name = "__mp_main__" if kind == "persistent" else "__main__"
            assert said(job, rank, "worked", "name") == [name]


def test_signals_of_the_rank_are_not_its_background_processs(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with ranks("calls", "goes_well", kind, str(tmp_path)) as job:
        job.start_all()
        child = gate.arrived()
        os.kill(child, signal.SIGINT)
        gate.open()
        ends_well(job)
        assert said(job, 0, "finalized", "index") == [0, 1]
