"""`ConsistentDDP` on real ranks: what only some parts use, and what none uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from procs import Job

RARE_STEPS = (0, 1, 3, 4)  # of the script: those in which a part that counts uses the branch


@pytest.fixture
def steps_of(ranks: Callable[..., Job]) -> Callable[[int], list[Any]]:
    """What the ranks of a job of a size have said of each step: all of them the same."""

    def steps_of(size: int) -> list[Any]:
        with ranks("unused", nprocs=size) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(size)))
            said = [job.lines(rank) for rank in range(size)]
        assert all(each == said[0] for each in said), "the ranks differ"
        return said[0]

    return steps_of


def test_what_no_part_uses_has_no_gradient_at_any_size(
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
            assert moved == used, "AdamW moves what has a gradient, and nothing else"
    for size in (2, 3):
        assert steps_of(size) == alone, f"{size} ranks"
