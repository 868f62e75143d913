"""`ConsistentDDP` on real ranks: parameters that only some parts use, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from procs import Job

RARE_STEPS = (
    0,
    1,
    3,
    4,
)  # the steps of the script in which a part with a weight above 0 uses the branch


@pytest.fixture
def steps_of(ranks: Callable[..., Job]) -> Callable[[int], list[Any]]:
    """The events of each step, the same on all ranks of a job."""

    def steps_of(size: int) -> list[Any]:
        with ranks("unused", nprocs=size) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(size)))
            said = [job.lines(rank) for rank in range(size)]
        assert all(each == said[0] for each in said), "the ranks differ"
        return said[0]

    return steps_of


@pytest.mark.slow
def test_unused_parameters_have_no_gradient_at_any_size(
    steps_of: Callable[[int], list[Any]],
) -> None:
    alone = steps_of(1)
    assert [step["right"] for step in alone] == [True] * 6
    for step, said in enumerate(alone):
        used = {name for name, each in said["branches"].items() if each["gradient"] is not None}
        rare = {"rare", "rare_half"} if step in RARE_STEPS else set()
        assert used == {"trunk"} | rare
        if step > 0:
            before = alone[step - 1]["branches"]
            moved = {n for n in before if before[n]["weights"] != said["branches"][n]["weights"]}
            assert moved == used, "AdamW changes exactly the parameters with a gradient"
    for size in (2, 3):
        assert steps_of(size) == alone, f"{size} ranks"
