"""A bit that flips in a parameter of a running rank is found, and the rank named."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.silent_runs import Ranks, Run
from outlast.async_checkpoint import CheckpointInfo
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic import ReplicaCheck
from outlast.elastic.silent_faults.comparison import Judge, Record
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.silent_faults.replica_check import RunningReplicaCheck
from outlast.events.emitter import Emitter
from outlast.events.types import ReplicaMismatch

HOST = socket.gethostname()
NET_S = 60.0
TOLD: dict[str, Any] = {
    "flip_at": 6,
    "replicas": {"every": 4, "on_mismatch": "call"},
    "every": None,
    "await": True,
}
EXCLUDE: dict[str, Any] = {
    "steps": 24,
    "every": 3,
    "replicas": {"every": 4, "on_mismatch": "exclude"},
    "job": {"keep": 1},
}
FLIP: dict[str, Any] = {"flip": 1, "flip_at": 7, "raises": True}


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_majority_names_the_rank_the_host_and_the_parameter(
    ranks: Ranks, tmp_path: Path, culprit: int
) -> None:
    run = Run(ranks, tmp_path, 3, flip=culprit, **TOLD)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.found(ReplicaMismatch)[0]
    assert (first.ranks, first.hosts, first.majority) == ([culprit], [HOST], True)
    assert (first.step, first.clean_step, first.replicas) == (8, 4, 3)
    assert first.parameters == ["first.weight"]
    text = f"after step 8: rank {culprit} on {HOST} differs from the other 2 replicas, in first.we"
    assert text in run.errors[0]
    lines = [
        line for errors in run.errors for line in errors.splitlines() if "differs from" in line
    ]
    assert (
        len(lines) == len(run.found(ReplicaMismatch)).bit_length()
    )  # the 1st, 2nd, 4th, 8th... time


@pytest.mark.slow
def test_a_buffer_that_nothing_writes_to_is_compared(ranks: Ranks, tmp_path: Path) -> None:
    """The statistics of the batch norm beside it are not: they differ legitimately."""
    plan = {**TOLD, "flip": 1, "flip_at": 10, "buffer": True, "batch_norm": True}
    run = Run(ranks, tmp_path, 3, **plan)
    assert set(run.codes.values()) == {0}, run.errors
    assert run.found(ReplicaMismatch)[0].parameters == ["scale"]
    assert (run.found(ReplicaMismatch)[0].step, run.found(ReplicaMismatch)[0].ranks) == (12, [1])
    assert run.found(ReplicaMismatch)[0].clean_step == 8


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, False])
def test_batch_norm_raises_no_alarm(ranks: Ranks, tmp_path: Path, broadcast: bool) -> None:
    plan: dict[str, Any] = {"steps": 2000, "every": None, "batch_norm": True, "own_data": True}
    run = Run(ranks, tmp_path, 2, **plan, replicas={"every": 10}, buffer=not broadcast)
    assert set(run.codes.values()) == {0}, run.errors
    assert run.found(ReplicaMismatch) == []


@pytest.mark.slow
def test_a_gradient_that_is_wrong_before_the_all_reduce_is_not_found(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The boundary of the check: all replicas apply the same wrong sum. After it, it is found."""
    plan: dict[str, Any] = {"steps": 24, "every": None, "replicas": {"every": 4}, "flip_at": 6}
    right = Run(ranks, tmp_path / "right", 3, **plan)
    before = Run(ranks, tmp_path / "before", 3, **plan, flip=1, gradient="before")
    assert set(before.codes.values()) == {0}, before.errors
    assert before.found(ReplicaMismatch) == []
    assert before.weights != right.weights  # one value for all ranks: see `weights`
    after = Run(ranks, tmp_path / "after", 3, **TOLD, flip=1, gradient="after")
    assert set(after.codes.values()) == {0}, after.errors
    first = after.found(ReplicaMismatch)[0]
    assert (first.ranks, first.step, first.clean_step) == ([1], 8, 4)
    assert first.parameters == ["first.weight"]


@pytest.mark.slow
def test_two_replicas_have_no_majority(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path, 2, flip=1, **TOLD)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.found(ReplicaMismatch)[0]
    assert (first.ranks, first.hosts, first.majority) == ([0, 1], [HOST, HOST], False)
    assert "no majority of replicas says which is wrong" in run.errors[0]


@pytest.mark.slow
def test_an_excluded_rank_leaves_and_the_others_go_back_to_before_the_flip(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, 3, min_ranks=2, **EXCLUDE, **FLIP)
    assert run.codes == {0: 0, 1: 1, 2: 0}, run.errors
    assert f"RankExcluded: after step 8: rank 1 on {HOST} differs" in run.errors[1]
    assert f"rank 1 on {HOST} differs from the other 2 replicas" in run.errors[0]
    # The newest checkpoint from before the difference, which one of the later ones has outlived.
    assert {line["step"] for line in run.of("restored") if line["iteration"] == 1} == {3}
    assert "restored step 3, from before the replicas differed" in run.errors[0]
    (mismatch,) = run.found(ReplicaMismatch)
    assert mismatch.clean_step == 4
    assert [line["size"] for line in run.of("entered") if line["iteration"] == 1] == [2, 2]
    assert not (tmp_path / "checkpoints" / "trust").exists()
    assert run.weights


@pytest.mark.slow
def test_without_a_majority_all_ranks_go_back_to_before_the_flip(
    ranks: Ranks, tmp_path: Path
) -> None:
    undisturbed = Run(ranks, tmp_path / "undisturbed", 2, **EXCLUDE)
    run = Run(ranks, tmp_path / "flip", 2, **EXCLUDE, **FLIP)
    assert set(run.codes.values()) == set(undisturbed.codes.values()) == {0}, run.errors
    assert not undisturbed.found(ReplicaMismatch)
    restored = {line["step"] for line in run.of("restored") if line["iteration"] == 1}
    assert restored == {3}, (run.lines, run.errors)
    assert run.weights == undisturbed.weights


@pytest.mark.slow
def test_a_flip_from_before_an_unrelated_fault_is_undone(ranks: Ranks, tmp_path: Path) -> None:
    """The survivors would continue with their own replicas, and DDP would copy that of rank 0 to
    all. The checkpoint of step 6 is from after the flip.
    """
    plan = {**EXCLUDE, "replicas": {"every": 10, "on_mismatch": "exclude"}}
    undisturbed = Run(ranks, tmp_path / "undisturbed", 2, **plan)
    run = Run(ranks, tmp_path / "flip", 2, **plan, flip=0, flip_at=5, fail_after=7)
    assert set(run.codes.values()) == set(undisturbed.codes.values()) == {0}, run.errors
    assert len([line for line in run.of("entered") if line["iteration"] == 2]) == 2
    assert {line["step"] for line in run.of("restored") if line["iteration"] > 0} == {0}
    assert [(each.step, each.clean_step) for each in run.found(ReplicaMismatch)] == [(7, 0)]
    assert run.weights == undisturbed.weights


@pytest.mark.slow
def test_the_last_state_is_compared_before_it_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    plan = {**EXCLUDE, "steps": 11}
    undisturbed = Run(ranks, tmp_path / "undisturbed", 2, **plan)
    run = Run(ranks, tmp_path / "flip", 2, **plan, flip=1, flip_at=11)
    assert set(run.codes.values()) == set(undisturbed.codes.values()) == {0}, run.errors
    assert [each.step for each in run.found(ReplicaMismatch)] == [11]
    assert {line["step"] for line in run.of("restored") if line["iteration"] == 1} <= {3, 6}
    assert run.weights == undisturbed.weights


@pytest.mark.slow
def test_a_job_started_anew_does_not_restore_what_was_saved_after_the_flip(
    ranks: Ranks, tmp_path: Path
) -> None:
    """All processes end before one of them has restored: only the folder tells."""
    first = Run(ranks, tmp_path, 3, **EXCLUDE, **FLIP)  # no replacement comes: it ends
    assert 0 not in first.codes.values(), first.errors
    assert (tmp_path / "checkpoints" / "trust").exists()
    again = Run(ranks, tmp_path, 3, **EXCLUDE)
    assert set(again.codes.values()) == {0}, again.errors
    assert {line["step"] for line in again.of("restored")} == {3}
    assert not (tmp_path / "checkpoints" / "trust").exists()


@pytest.mark.slow
def test_only_ranks_with_the_same_shard_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    """Two shards, each on two ranks: 0 and 2 hold one, 1 and 3 the other."""
    run = Run(ranks, tmp_path, 4, shards=2, flip=3, **TOLD)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.found(ReplicaMismatch)[0]
    assert (first.ranks, first.majority, first.replicas) == ([1, 3], False, 2)
    assert first.parameters == ["first.weight"]


def test_the_checkpoint_before_a_comparison_without_a_result_is_kept() -> None:
    """Of two ranks in one process, the other one is late."""
    store, check = MemoryStore(), ReplicaCheck(every=4, on_mismatch="exclude")
    module = torch.nn.Linear(2, 2)
    first, second = (
        RunningReplicaCheck(check, module, CallLedger(store, "c", rank, 2), Emitter(None), 0)
        for rank in range(2)
    )
    checks = JobChecks([check])
    checks._replicas = first
    keep = checks.retention(1)

    def removable(*steps: int) -> list[int]:
        found = [CheckpointInfo(step, f"step-{step:08d}", 1, 2, None, 1) for step in steps]
        return [info.step for info in keep.removable(found, steps[-1])]

    with first, second:
        assert removable(0, 3) == []
        for step in (1, 2, 3, 4, 5):
            first.step(step)
        assert removable(0, 2, 3, 6) == [2], "step 4 may turn out to be clean"
        for step in (1, 2, 3, 4, 5):
            second.step(step)
        second.compare_now(0.0)
        first.compare_now(NET_S)  # the results of steps 4 and 5
        assert first.undecided_steps == []
        assert removable(0, 3, 5, 6) == [3], "the other rank does not know of step 5 yet"


def record(rank: int, **buffers: str) -> Record:
    return Record("s", f"host{rank}", 4, [1], ["same"], buffers=buffers)


def test_which_buffers_are_compared() -> None:
    """Not those that were different from the beginning, nor those that all ranks write to."""
    judge = Judge(0)

    def differing(*cycle: dict[str, str]) -> list[tuple[list[int], list[str]]]:
        result = judge([record(rank, **buffers) for rank, buffers in enumerate(cycle)])
        return [(each.ranks, each.buffers) for each in result.differences]

    assert differing({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "c": "1"}) == []
    assert differing({"a": "1", "b": "1", "c": "2"}, {"a": "1", "b": "3", "c": "3"}) == []
    assert differing({"a": "1", "c": "4"}, {"a": "1", "c": "5"}) == []
    assert judge.clean_step == 4
    assert differing({"a": "1"}, {"a": "2"}) == [([0, 1], ["a"])]
    assert differing({"a": "1"}, {"a": "2"}, {"a": "1"}) == [([1], ["a"])]
    assert differing({"a": "1"}, {}, {"a": "1"}) == []
