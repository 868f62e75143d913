"""Restart in place: a save in flight is committed by all or dropped by all; no resource leaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from async_checkpoint.checkpoints import left_over, valid_steps
from procs import Job

RESTARTS = 100

Ranks = Callable[..., Job]


@pytest.mark.slow
def test_restarts_with_a_save_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "c"
    with ranks("restarts", "restarts", str(path), str(RESTARTS)) as job:
        job.start_all()
        assert job.wait_all(150) == {0: 0, 1: 0}, (job.errors(0) + job.errors(1))[-4000:]
        stories = []
        for rank in range(2):
            began = [line for line in job.lines(rank) if line["event"] == "began"]
            assert [line["iteration"] for line in began] == list(range(RESTARTS + 1))
            stories.append([line["step"] for line in began])
            # Taken over; an interrupt during a message to the writer ends the writer.
            assert len({line["writer"] for line in began[1:]}) < RESTARTS // 2
            used = [line["memories"] for line in began[10:]]
            assert all(memories == used[0] for memories in used)
            early, late = (line["held"] for line in began if line["held"])
            assert early == late
        assert stories[0] == stories[1]
        done = -1
        for line in job.lines(0):
            if line["event"] == "began":
                assert (line["step"] if line["step"] is not None else -1) >= done
            elif line["event"] == "committed":
                done = line["step"]
    assert valid_steps(path)[-1] == stories[0][-1] + 1
    assert left_over(path) == []


def test_a_save_that_a_restart_drops_is_no_error(ranks: Ranks, tmp_path: Path) -> None:
    """Not in the log of any rank, whether the save was dropped or committed just in time."""
    with ranks("restarts", "restarts", str(tmp_path / "c"), "4") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, (job.errors(0) + job.errors(1))[-4000:]
        for rank in range(2):
            assert [line["iteration"] for line in job.lines(rank) if line["event"] == "began"] == [
                *range(5)
            ]
            assert "save of step" not in job.errors(rank)
            assert "was not saved" not in job.errors(rank)
    assert left_over(tmp_path / "c") == []


def test_each_iteration_makes_a_checkpointer_without_closing_the_one_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    """One that has to be closed first is one of the same iteration."""
    with ranks("restarts", "never_closed", str(tmp_path / "c")) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, (job.errors(0) + job.errors(1))[-4000:]
        for rank in range(2):
            lines = job.lines(rank)
            assert [line["iteration"] for line in lines if line["event"] == "began"] == [0, 1, 2]
            refused = [line["message"] for line in lines if line["event"] == "refused"]
            assert len(refused) == 3
            assert all(f"Checkpointer (or a Job) for {tmp_path}/c" in text for text in refused)
    assert {1, 2, 3} <= set(valid_steps(tmp_path / "c"))


def test_a_rank_0_in_reserve_does_not_keep_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    """The rank 0 of the next iteration is another process, which locks it."""
    with ranks("restarts", "rank_0_goes_into_reserve", str(tmp_path / "c"), nprocs=3) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0, 2: 0}, job.errors(1)[-4000:]
        lines = [line for rank in range(3) for line in job.lines(rank) if line["event"] == "began"]
        first, second = ({x["rank"]: x for x in lines if x["iteration"] == k} for k in (0, 1))
        assert len(lines) == 4
        assert second[0]["pid"] == first[1]["pid"]
        assert [second[rank]["step"] for rank in range(2)] == [1, 1]
    assert valid_steps(tmp_path / "c") == [1, 2]
    assert left_over(tmp_path / "c") == []
