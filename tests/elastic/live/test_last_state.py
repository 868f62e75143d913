"""Before a job ends, the newest state that its ranks still have is saved; the next run continues
there, bit by bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, Run, fault, later, ranks_of, run

SLOW = pytest.mark.slow
ABORT, REPEATED, KILLED = 1, 93, -9


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "live.py"
    return run(ranks_of(folder, script, zygote), folder / "checkpoints")


def end(
    ranks: Ranks,
    path: Path,
    *faults: dict[str, Any],
    codes: dict[int, int],
    **plan: Any,
) -> Run:
    """Runs a job that ends before it is complete, with these exit codes."""
    arguments = json.dumps({"path": str(path), "faults": faults, "await": False, **plan})
    with ranks("live", arguments, nprocs=len(codes)) as job:
        job.start_all()
        found = job.wait_all()
        errors = "\n".join(job.errors(rank) for rank in codes)
        assert found == codes, errors
        return Run([line for rank in codes for line in job.lines(rank)], errors)


def saved(path: Path) -> int:
    return max(int(each.name.removeprefix("step-")) for each in path.glob("step-*"))


def check_continued(ended: Run, second: Run, reference: Run) -> None:
    """Both runs together are the one without faults."""
    assert {**ended.losses(), **second.losses()} == reference.losses(), second.errors
    assert second.ended() == reference.ended(), second.errors


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=SLOW)])
def test_the_state_of_the_survivors_when_none_replaces_the_lost_rank(
    ranks: Ranks, tmp_path: Path, reference: Run, lost: int
) -> None:
    """The lost rank's own state too: dropout, noise, and the statistics of the batch norm."""
    path, codes = tmp_path / "c", {lost: KILLED, 1 - lost: ABORT}
    ended = end(ranks, path, *later(lost, 6, "forward 7", "SIGKILL"), codes=codes)
    assert "needs 2; nothing replaces a lost rank here" in ended.errors
    assert "step 6, the newest one that the ranks had, is saved now (" in ended.errors
    second = run(ranks, path)
    assert second.restored(0) == {0: (6, "storage"), 1: (6, "storage")}
    check_continued(ended, second, reference)


@SLOW
def test_a_step_that_only_the_survivor_has_completed(
    ranks: Ranks, tmp_path: Path, reference: Run
) -> None:
    faults = fault(0, "done 7", "mark done"), fault(1, "torn 7", "await done, SIGKILL")
    ended = end(ranks, tmp_path / "c", *faults, codes={0: ABORT, 1: KILLED})
    assert "step 7, the newest one" in ended.errors
    second = run(ranks, tmp_path / "c")
    wanted = {key: loss for key, loss in reference.losses().items() if key != (1, 7)}
    assert {**ended.losses(), **second.losses()} == wanted
    assert second.ended() == reference.ended()


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_last_good_step_of_a_fault_that_comes_back(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "c"
    whole = run(ranks, tmp_path / "whole", kind=kind)
    always = fault(1, "forward 7", "raise", always=True)
    ended = end(ranks, path, always, codes={0: REPEATED, 1: REPEATED}, kind=kind)
    lines = ended.errors.splitlines()
    told = next(i for i, line in enumerate(lines) if "step 6, the newest one" in line)
    assert "the job ends after 3 equal faults" in "\n".join([*lines[told:], ended.errors])
    second = run(ranks, path, kind=kind)
    assert second.restored(0) == {0: (6, "storage"), 1: (6, "storage")}
    check_continued(ended, second, whole)


@SLOW
def test_shards_that_are_lost_are_named(ranks: Ranks, tmp_path: Path) -> None:
    faults = later(1, 6, "forward 7", "SIGKILL")
    ended = end(ranks, tmp_path / "c", *faults, codes={0: ABORT, 1: KILLED}, kind="fsdp")
    assert "the newest state that the ranks have is not saved" in ended.errors
    assert "step 6 lacks the shards of rank 1" in ended.errors
    assert saved(tmp_path / "c") == 4


@SLOW
def test_weights_that_are_not_finite_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    faults = [fault(rank, "stepped 6", "spoil", always=True) for rank in (0, 1)]
    ended = end(ranks, tmp_path / "c", *faults, codes={0: REPEATED, 1: REPEATED})
    assert "NonFinite" in ended.errors
    assert "model.0.weight is not finite" in ended.errors
    assert "is saved now" not in ended.errors


@SLOW
def test_a_lost_rank_without_a_trace_is_named(ranks: Ranks, tmp_path: Path) -> None:
    faults = later(1, 6, "forward 7", "lose, SIGKILL")
    ended = end(ranks, tmp_path / "c", *faults, codes={0: ABORT, 1: KILLED})
    assert "is saved now; the random generators of rank 1 are lost with it" in ended.errors
    assert run(ranks, tmp_path / "c").restored(0)[1] == (6, "storage")


@SLOW
def test_a_survivor_that_dies_in_the_last_save_keeps_nobody(ranks: Ranks, tmp_path: Path) -> None:
    faults = *later(2, 6, "forward 7", "SIGKILL", nprocs=3), fault(0, "last save", "SIGKILL")
    codes = {0: KILLED, 1: ABORT, 2: KILLED}
    ended = end(ranks, tmp_path / "c", *faults, codes=codes, job={"linger": 1})
    assert "is not saved in" in ended.errors
    assert "another rank was lost meanwhile" in ended.errors
    assert "rank 2 was lost" in ended.errors
    assert saved(tmp_path / "c") == 4
