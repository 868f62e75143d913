"""`ShardedStream` on real ranks: each record once, after resuming with more or fewer ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procs import Job

RECORDS, EPOCHS = 36, 2  # as in the script
Lines = list[dict[str, Any]]


@pytest.fixture
def train(ranks: Callable[..., Job], tmp_path: Path) -> Callable[[int, int], list[Lines]]:
    """Runs a job for some steps, or to the end; returns the events of each rank."""

    def train(size: int, steps: int) -> list[Lines]:
        with ranks("stream", str(tmp_path / "state.json"), str(steps), nprocs=size) as job:
            job.start_all()
            assert set(job.wait_all().values()) == {0}, "\n".join(map(job.errors, range(size)))
            return [job.lines(rank) for rank in range(size)]

    return train


def of_all(ranks: list[Lines], event: str) -> Any:
    """The state in this event, the same on all ranks."""
    states = [line["state"] for lines in ranks for line in lines if line["event"] == event]
    assert all(state == states[0] for state in states)
    assert len(states) == len(ranks)
    return states[0]


def rounds(ranks: list[Lines]) -> list[tuple[dict[str, Any], ...]]:
    """The events of all ranks, step by step."""
    said = [[line for line in lines if line["event"] == "trained"] for lines in ranks]
    return list(zip(*said, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "steps"), [((3, 2), 3), ((3, 4), 3), ((3, 4, 2), 2)])
def test_each_record_once_per_epoch_at_another_size(
    train: Callable[[int, int], list[Lines]], sizes: tuple[int, ...], steps: int
) -> None:
    epochs: dict[int, list[int]] = {}
    left: Any = None
    trained = 0
    for size in sizes:
        ranks = train(size, 0 if size == sizes[-1] else steps)
        if left is not None:
            assert left["epoch"] == 0
            assert any(left["offsets"]), "saved within an epoch"
            assert of_all(ranks, "loaded") == {**left, "global_batch_size": 2 * size}
        for together in rounds(ranks):
            items = [item for line in together for item in line["items"]]
            (epoch,) = {line["epoch"] for line in together}
            epochs.setdefault(epoch, []).extend(items)
            for line in together:
                assert line["mean"] == pytest.approx(sum(items) / len(items))
        left = of_all(ranks, "left")
        (count,) = {line["trained"] for lines in ranks for line in lines if "trained" in line}
        trained += count
    assert left["epoch"] == EPOCHS
    assert trained == EPOCHS * RECORDS
    assert sorted(epochs) == list(range(EPOCHS))
    for items in epochs.values():
        assert sorted(items) == list(range(RECORDS))
