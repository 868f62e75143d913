"""Ranks that behave differently, and ranks that are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_checkpoint.checkpoints import left_over, valid_steps
from async_checkpoint.staged_writer import Plan
from procs import Job

Ranks = Callable[..., Job]


def said(job: Job, rank: int, event: str, field: str) -> list[Any]:
    return [line[field] for line in job.lines(rank) if line["event"] == event]


def run(ranks: Ranks, scenario: str, tmp_path: Path, nprocs: int = 2) -> Job:
    Plan(tmp_path / "plan")
    job = ranks("uneven", scenario, str(tmp_path / "c"), str(tmp_path / "plan"), nprocs=nprocs)
    with job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, "\n".join(map(job.errors, range(nprocs)))
    return job


def test_ranks_that_save_in_different_orders(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "another_order", tmp_path)
    for rank in range(2):
        (message,) = said(job, rank, "raised", "message")
        assert "scheduled in different order on different ranks" in message
        assert "save of step 1" in message
        assert "save of step 2" in message
    assert valid_steps(tmp_path / "c") == [0, 3]
    assert left_over(tmp_path / "c") == []


def test_an_interrupt_before_the_snapshot_fails_the_save_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    run(ranks, "one_is_interrupted_before_its_snapshot", tmp_path)


def test_one_rank_changes_what_it_saves(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, "one_changes", tmp_path, nprocs=3)
    assert valid_steps(tmp_path / "c") == [1, 2, 3, 4]


def test_one_rank_changes_what_it_saves_while_training_waits_for_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    run(ranks, "one_changes_while_training_waits", tmp_path, nprocs=3)
    assert valid_steps(tmp_path / "c") == [1, 2, 3]


def test_after_a_restart_ranks_go_on_with_what_they_have_agreed_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    job = run(ranks, "goes_on", tmp_path)
    for rank in range(2):
        names = [line["names"] for line in job.lines(rank) if line["event"] == "agreed"]
        assert names == [[], [], ["preparation of saves"]]


def test_a_save_of_the_same_structure_has_one_round(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "unchanged", tmp_path)
    # It is announced, and reported: on rank 0 a thread reads the announcements meanwhile.
    for rank, waits in enumerate(
        (
            {"await_verdict": 2, "parts": 2, "await_conclusion": 0},
            {"await_verdict": 1, "parts": 0, "await_conclusion": 1},
        )
    ):
        (line,) = [line for line in job.lines(rank) if line["event"] == "counted"]
        expected = {"announce": 1, "finish": 2, "forget": 2, **waits}
        assert {name: line[name] for name in expected} == expected


def test_shapes_that_differ_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "other_shapes", tmp_path)
    for rank in range(2):
        (message,) = said(job, rank, "raised", "message")
        assert "'x' is a tensor (1,) of float32 on rank 0" in message
        assert "a tensor (2,) of float32 on rank 1" in message
    assert valid_steps(tmp_path / "c") == [2]


def test_a_value_that_one_rank_cannot_save_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "one_cannot", tmp_path)
    for rank in range(2):
        pickled, key = said(job, rank, "raised", "message")
        assert "'own1' cannot be saved: a " in pickled
        assert "has the key 1.5" in key
    assert "rank 1" in said(job, 0, "raised", "message")[0]
    assert valid_steps(tmp_path / "c") == [3]


def test_the_writer_of_one_rank_is_killed(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "one_writer_is_killed", tmp_path)
    for rank in range(2):
        (message,) = said(job, rank, "raised", "message")
        assert "save of step 2 failed on rank 1 on" in message
        assert "was killed by SIGKILL" in message
    assert valid_steps(tmp_path / "c") == [1, 3]
    assert left_over(tmp_path / "c") == []


def test_a_lost_rank_does_not_delay_an_abort(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan")
    plan.set({"op": "write_at", "name": "__1_0.distcp", "do": "wait", "gate": "never"})
    plan.gate("never")
    with ranks("uneven", "one_is_lost", str(tmp_path / "c"), str(plan.folder)) as job:
        job.start_all()
        for rank in range(2):
            job.wait_for_line(rank, lambda line: line["event"] == "saving")
        job.kill(1)
        (tmp_path / "plan" / "lost").touch()
        assert job.wait(0) == 0, job.errors(0)
        (message,) = said(job, 0, "raised", "message")
        assert "the save of step 1 was dropped for all ranks by rank 0 on" in message
    assert valid_steps(tmp_path / "c") == []


def test_a_checkpoint_that_one_rank_finds_damaged_is_skipped_by_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    job = run(ranks, "one_sees_damage", tmp_path)
    for rank in range(2):
        assert said(job, rank, "returned", "value") == [1]


def test_one_rank_may_not_read_the_memory_of_another(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, "one_cannot_open_memory", tmp_path)


def test_a_restore_takes_few_rounds(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "restores_of_few_rounds", tmp_path)
    for rank in range(2):
        lines = [line for line in job.lines(rank) if line["event"] == "restored"]
        assert [(e["source"], e["rounds"]) for e in lines] == [("memory", 6), ("storage", 4)]


def test_a_state_that_one_rank_cannot_make_holds_up_no_other(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, "one_cannot_make_its_state", tmp_path)


def test_small_values_need_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, "values_are_told_or_sent", tmp_path)


def test_one_rank_lacks_a_small_tensor(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, "one_lacks_a_small_tensor", tmp_path)


def test_a_rank_without_memory_for_received_data_does_not_block_the_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    job = run(ranks, "one_has_no_room", tmp_path)
    (message,) = said(job, 0, "raised", "message")
    assert "rank 1 on" in message
    assert "no memory for what is sent" in message
    assert said(job, 1, "raised", "type") == ["MemoryError"]


def test_a_writer_that_does_not_answer_does_not_block_the_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    job = run(ranks, "one_writer_does_not_answer", tmp_path)
    for rank in range(2):
        assert len([line for line in job.lines(rank) if line["event"] == "restored"]) == 1


def test_ranks_with_all_they_need_in_memory_exchange_nothing(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, "each_has_its_own", tmp_path)
    for rank in range(2):
        (message,) = said(job, rank, "raised", "message")
        assert "only in the state dict: more" in message


def test_close_in_time_drops_for_all(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan")
    plan.set({"op": "write_at", "name": "__1_0.distcp", "do": "wait", "gate": "never"})
    plan.gate("never")
    job = run(ranks, "closes", tmp_path)
    for rank in range(2):
        (message,) = said(job, rank, "raised", "message")
        assert "steps [1] were not committed within" in message or "dropped" in message
    assert valid_steps(tmp_path / "c") == []
