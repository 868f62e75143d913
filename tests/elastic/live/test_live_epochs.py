"""A fault at the end of an epoch: the survivors' state is that of its last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, later, run
from procs import Job

Ranks = Callable[..., Job]


def ends(found: Run) -> dict[tuple[int, int], set[str]]:
    """What each rank has drawn at the end of each epoch, and its learning rate then."""
    by_rank: dict[tuple[int, int], set[str]] = {}
    for line in found.events("epoch end"):
        said = f"{line['drawn']} {line['rate']}"
        by_rank.setdefault((line["of"], line["epoch"]), set()).add(said)
    return by_rank


@pytest.mark.slow
@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize("at", ["end 0", "forward 7", "end 1"])
def test_the_end_of_an_epoch_is_repeated(ranks: Ranks, tmp_path: Path, at: str, do: str) -> None:
    plan: dict[str, Any] = {"every": None}
    reference = run(ranks, tmp_path / "reference", **plan)
    epoch = 1 if at == "end 1" else 0
    # Otherwise rank 0 may be interrupted in the last step, and receive the state after it.
    faults = later(1, 6 * (epoch + 1), at, do)
    faulty = run(ranks, tmp_path / "faulty", *faults, **plan)
    assert faulty.losses() == reference.losses(), faulty.errors
    # Made after the restore, DDP gives all ranks the batch-norm statistics of rank 0.
    assert faulty.ended()[0] == reference.ended()[0], faulty.errors
    assert ends(faulty) == ends(reference)
    again = [line for line in faulty.events("epoch end") if line["epoch"] == epoch]
    assert len(again) > 2, "both ranks, and at least one of them again"
    assert {step for step, _ in faulty.restored().values()} == {6 * (epoch + 1)}
