"""A `Job` of ranks whose models differ: what a checkpoint contains, and when that is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.elastic.job.same_on_all_ranks import difference
from procs import Job, Line

SLOW = pytest.mark.slow
NAME = "'0.weight'"


def run(ranks: Callable[..., Job], path: Path, when: str) -> list[list[Line]]:
    with ranks("replicas", str(path), when) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0) + job.errors(1)
        return [job.lines(rank) for rank in range(2)]


def test_ranks_that_begin_with_different_models_are_refused(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    errors = [lines[0]["error"] for lines in run(ranks, tmp_path / "state", "before")]
    assert all("DistributedDataParallel before job.restore()" in error for error in errors)
    named = [rank for rank, error in enumerate(errors) if f"{NAME} has other values" in error]
    assert len(named) == 1  # the other rank was the first to say what it has
    assert f"on rank {named[0]} than" in errors[named[0]]
    assert f"(rank {named[0]} names a tensor" in errors[1 - named[0]]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["after", "buffers"])
def test_the_model_of_rank_0_is_saved(ranks: Callable[..., Job], tmp_path: Path, when: str) -> None:
    first, second = run(ranks, tmp_path / "state", when)
    expected = first[0]["state"]
    assert (second[0]["state"] == expected) == (when == "after")
    assert first[1]["state"] == second[1]["state"] == expected


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("stages", "parameter 2 is 'stage0.weight' of shape (6, 4) on rank 0, and 'stage1.weight'"),
        pytest.param("unrestored", "and 'stage1.weight' of shape (6, 4) on rank 1", marks=SLOW),
        pytest.param(
            "shapes", "'0.weight' of shape (6, 4) on rank 0, and '0.weight' of", marks=SLOW
        ),
        pytest.param("fsdp1", "0 is a FullyShardedDataParallel module", marks=SLOW),
    ],
)
def test_an_optimizer_whose_state_has_no_common_numbers_is_refused(
    ranks: Callable[..., Job], tmp_path: Path, when: str, says: str
) -> None:
    """State 0 of one pipeline stage would be saved as a copy of state 0 of another one."""
    for lines in run(ranks, tmp_path / "state", when):
        assert says in lines[0]["error"]
        assert ("a Checkpointer, by the names" in lines[0]["error"]) == (when != "fsdp1")


def test_the_error_names_all_ranks_of_a_stage() -> None:
    first, second = [("a", (2,)), ("b", (3,))], [("a", (2,))]
    text = difference(["x", "y", "x", "y"], [first, second, None, None])
    assert "parameter 1 is 'b' of shape (3,) on ranks 0, 2, and missing on ranks 1, 3" in text
    many = difference(["x"] + ["y"] * 12, [first, second, *[None] * 11])
    assert "on rank 0, and missing on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more" in many
