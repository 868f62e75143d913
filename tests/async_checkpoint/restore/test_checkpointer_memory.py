"""Snapshots outlive the process that made them, but nothing outlives the job."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from async_checkpoint.checkpoints import NET, blank, left_over, same, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from inprocess.mutations import mutate
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore import verified_read
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointPassedOver, CheckpointRestored
from procs import Job
from zygote import Zygote

Ranks = Callable[..., Job]
NET_S = 60.0


def begins_to_save(job: Job) -> list[int]:
    """Waits until all ranks are in the middle of a save; returns the pidfds of their writers."""
    writers = []
    for rank in range(job.nprocs):
        line = job.wait_for_line(rank, lambda line: line["event"] == "saving")
        writers.append(os.pidfd_open(line["writer"]))
    return writers


def have_ended(writers: list[int]) -> None:
    """Waits for the end of processes."""
    for writer in writers:
        poll = select.poll()
        poll.register(writer, select.POLLIN)
        assert poll.poll(NET_S * 1000)
        os.close(writer)


@pytest.mark.parametrize("forks", ["", pytest.param("forks", marks=pytest.mark.slow)])
def test_a_killed_process_is_replaced(ranks: Ranks, tmp_path: Path, forks: str) -> None:
    """Even if a fork holds the channel to the writer open."""
    path, plan = tmp_path / "c", Plan(tmp_path / "plan")
    with ranks("lives", "leaves_a_snapshot", str(path), str(plan.folder), forks, nprocs=1) as job:
        job.start_all()
        writers = begins_to_save(job)
        os.kill(job.pid(0), signal.SIGKILL)
        job.wait(0)
        assert valid_steps(path) == [1]
        with ranks("lives", "takes_a_snapshot", str(path), nprocs=1) as next_job:
            next_job.start_all()
            assert next_job.wait(0) == 0, next_job.errors(0)
            (line,) = next_job.lines(0)
            assert line["step"] == 2
            assert line["handed_over"] == 1
        have_ended(writers)
        if forks:
            os.killpg(job.pid(0), signal.SIGKILL)
    assert valid_steps(path) == [1, 3]
    assert left_over(path) == []


@pytest.mark.slow
def test_all_ranks_are_replaced(ranks: Ranks, tmp_path: Path) -> None:
    path, plan = tmp_path / "c", Plan(tmp_path / "plan")
    with ranks("lives", "leaves_a_snapshot", str(path), str(plan.folder)) as job:
        job.start_all()
        writers = begins_to_save(job)
        for rank in range(2):
            job.kill(rank)
        with ranks("lives", "takes_a_snapshot", str(path)) as next_job:
            next_job.start_all()
            assert set(next_job.wait_all().values()) == {0}, next_job.errors(0)
            assert [next_job.lines(rank)[0]["step"] for rank in range(2)] == [2, 2]
        have_ended(writers)
    assert valid_steps(path) == [1, 3]


@pytest.mark.slow
def test_a_snapshot_that_not_all_ranks_have_is_not_taken(ranks: Ranks, tmp_path: Path) -> None:
    path, plan = tmp_path / "c", Plan(tmp_path / "plan")
    with ranks("lives", "leaves_a_snapshot", str(path), str(plan.folder)) as job:
        job.start_all()
        writers = begins_to_save(job)
        signal.pidfd_send_signal(writers[1], signal.SIGKILL)
        for rank in range(2):
            job.kill(rank)
        with ranks("lives", "takes_a_snapshot", str(path)) as next_job:
            next_job.start_all()
            assert set(next_job.wait_all().values()) == {0}, next_job.errors(0)
            assert [next_job.lines(rank)[0]["step"] for rank in range(2)] == [1, 1]
        have_ended(writers)


def check_damaged_memory(path: Path) -> None:
    """A byte of the newest snapshot changes in memory: its checksum does not hold."""
    sink = MemorySink()
    with Checkpointer(path, events=sink) as checkpointer:
        checkpointer.save(2, state_of(2)).wait(NET)
        checkpointer.session.pool.buffers[0].targets(0)[5] += 1
        state = blank()
        assert checkpointer.restore(state) == 2
        assert same(state, state_of(2))
    _, passed, loaded = sink.events
    assert isinstance(passed, CheckpointPassedOver)
    assert isinstance(loaded, CheckpointRestored)
    assert (passed.source, loaded.source) == ("memory", "storage")
    assert "the snapshot of step 2 in memory/__0_0.distcp is damaged" in passed.cause


def test_a_snapshot_that_was_damaged_is_passed_over(tmp_path: Path) -> None:
    check_damaged_memory(tmp_path)


def test_it_is_noticed_when_memory_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, verified_read.is_intact, "checksums[number] == found", "True")
    with pytest.raises(AssertionError):
        check_damaged_memory(tmp_path)


@pytest.mark.slow
def test_a_writer_ends_with_its_launcher(tmp_path: Path) -> None:
    """Without a launcher no replacement can start, so a snapshot is of no use."""
    path, plan = tmp_path / "c", Plan(tmp_path / "plan")
    scripts = Path(__file__).parents[1] / "scripts"
    zygote = Zygote(["outlast.async_checkpoint"])
    job = Job(
        tmp_path,
        scripts / "lives.py",
        nprocs=1,
        args=["leaves_a_snapshot", str(path), str(plan.folder)],
        spawn=zygote.spawn,
    )
    with job:
        with zygote:
            job.start_all()
            writers = begins_to_save(job)
            job.kill(0)
        have_ended(writers)
    with Checkpointer(path) as checkpointer:
        assert checkpointer.restore(blank(), strict=False) == 1


def test_at_the_end_of_the_program_saves_are_finished(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "c"
    with ranks("lives", "exits_without_close", str(path), nprocs=1) as job:
        job.start_all()
        assert job.wait(0) == 0, job.errors(0)
    assert valid_steps(path) == [1, 2]
    assert left_over(path) == []


@pytest.mark.parametrize("how", ["asked", "restored elsewhere"])
def test_a_restore_uses_no_list_from_before_another_save(tmp_path: Path, how: str) -> None:
    state = state_of(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
        restorer = checkpointer.restorer
        if how == "asked":
            assert restorer.newest(-1) == 1
        else:
            restorer.looked(restorer.sort(None, [restorer.held()]), None)
            restorer.restored_elsewhere(1, "fallback", 0.0, 0)
        checkpointer.save(2, state).wait()
        assert checkpointer.restore(blank()) == 2
