"""The ledgers of a process share connections, and their waits do not block each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job

Ranks = Callable[..., Job]


def ends_well(job: Job) -> None:
    job.start_all()
    assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(job.nprocs)))


@pytest.mark.slow
def test_a_job_a_checkpointer_and_a_queue_share_one_all_reduce_and_few_connections(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ranks("connections", "of_everything", str(tmp_path), nprocs=2) as job:
        ends_well(job)
        for rank in range(2):
            lines = job.lines(rank)
            ended = [line for line in lines if line["event"] == "ended"]
            # One for the store; the first life also agrees that the models are equal, the second
            # one that its restore has loaded the state.
            assert [line["all_reduces"] for line in ended] == [2, 2]
            for line, busy in zip(
                ended, [e for e in lines if e["event"] == "connections"], strict=True
            ):
                # One for operations that return at once, and one for each concurrent wait: the
                # job's for a stop request, its save's, and the checkpointer's or the queue's.
                assert 2 <= busy["count"] - line["before"] <= 5
                assert line["after"] == line["before"], "they end with the last ledger"


@pytest.mark.slow
def test_waits_of_two_ledgers_do_not_hold_up_each_other(ranks: Ranks) -> None:
    with ranks("connections", "waits_do_not_hold_up_each_other", "", nprocs=2) as job:
        ends_well(job)
        for rank in range(2):
            (line,) = [line for line in job.lines(rank) if line["event"] == "answers"]
            assert sorted(line["answers"]) == ["first", "second"]
        assert line["answers"][0] == "second" or rank
