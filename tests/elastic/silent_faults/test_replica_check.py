"""A bit that flips in a parameter of a running rank is found, and the rank named."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.events import ReplicaMismatch
from outlast.events.report import load
from procs import Job, Line

Ranks = Callable[..., Job]
HOST = socket.gethostname()
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


class Run:
    """A job of `silent_faults.py`, run to its end."""

    def __init__(self, ranks: Ranks, path: Path, nprocs: int, **plan: Any) -> None:
        events = path / "events"
        events.mkdir(parents=True, exist_ok=True)
        arguments = json.dumps({"path": str(path / "checkpoints"), **plan})
        env = {"OUTLAST_EVENTS_DIR": str(events)}
        with ranks("silent_faults", arguments, nprocs=nprocs, env=env) as job:
            job.start_all()
            self.codes = job.wait_all()
            self.lines = [line for rank in range(nprocs) for line in job.lines(rank)]
            self.errors = [job.errors(rank) for rank in range(nprocs)]
        assert any(events.iterdir()), self.errors
        self.events = load(events)

    def of(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def mismatches(self) -> list[ReplicaMismatch]:
        return [event for event in self.events if isinstance(event, ReplicaMismatch)]

    @property
    def weights(self) -> str:
        (weights,) = {line["weights"] for line in self.of("ended")}
        return str(weights)


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_majority_names_the_rank_the_host_and_the_parameter(
    ranks: Ranks, tmp_path: Path, culprit: int
) -> None:
    run = Run(ranks, tmp_path, 3, flip=culprit, **TOLD)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.mismatches[0]
    assert (first.ranks, first.hosts, first.majority) == ([culprit], [HOST], True)
    assert (first.step, first.clean_step, first.replicas) == (8, 4, 3)
    assert first.parameters == ["first.weight"]
    text = f"after step 8: rank {culprit} on {HOST} differs from the other 2 replicas, in first.we"
    assert text in run.errors[0]
    lines = [
        line for errors in run.errors for line in errors.splitlines() if "differs from" in line
    ]
    assert len(lines) == len(run.mismatches).bit_length()  # the 1st, 2nd, 4th, 8th... time


@pytest.mark.slow
def test_two_replicas_have_no_majority(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path, 2, flip=1, **TOLD)
    assert set(run.codes.values()) == {0}, run.errors
    first = run.mismatches[0]
    assert (first.ranks, first.hosts, first.majority) == ([0, 1], [HOST, HOST], False)
    assert "no majority of replicas says which is wrong" in run.errors[0]


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
    (mismatch,) = run.mismatches
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
    assert not undisturbed.mismatches
    assert {line["step"] for line in run.of("restored") if line["iteration"] == 1} == {3}
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
    assert [(each.step, each.clean_step) for each in run.mismatches] == [(7, 0)]
    assert run.weights == undisturbed.weights


@pytest.mark.slow
def test_the_last_state_is_compared_before_it_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    plan = {**EXCLUDE, "steps": 11}
    undisturbed = Run(ranks, tmp_path / "undisturbed", 2, **plan)
    run = Run(ranks, tmp_path / "flip", 2, **plan, flip=1, flip_at=11)
    assert set(run.codes.values()) == set(undisturbed.codes.values()) == {0}, run.errors
    assert [each.step for each in run.mismatches] == [11]
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
    first = run.mismatches[0]
    assert (first.ranks, first.majority, first.replicas) == ([1, 3], False, 2)
    assert first.parameters == ["first.weight"]
