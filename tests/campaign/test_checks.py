"""The checks of a round, on records: steps that are missing, descriptors that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_checkpoint import made
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.campaign.records import Entry, Records, Reference, Step, differences
from outlast.campaign.rounds.checks import leaks, unfinished_checkpoints


def test_a_step_that_another_rank_has_completed_may_lack_its_record(tmp_path: Path) -> None:
    """The rank died before it wrote the record, and continued from the other rank's state."""
    losses = {(step, rank): "0x1p+0" for step in (1, 2) for rank in (0, 1)}
    records = Records(tmp_path)
    for step, rank in ((1, 0), (1, 1), (2, 0)):
        records.write(Step(step=step, rank=rank, loss="0x1p+0"))
    assert differences(Reference(losses, {}), tmp_path) == []
    more = Reference({**losses, (3, 0): "0x1p+0", (3, 1): "0x1p+0"}, {})
    assert differences(more, tmp_path) == ["1 steps were never trained, the first is step 3"]


@pytest.mark.parametrize(
    ("counts", "grows"),
    [
        ((24, 26, 27, 39), False),  # the first save opens its memory
        ((24, 26, 27, 39, 40, 41, 40, 41), False),
        ((24, 26, 27, 30, 33, 36, 39), True),
        ((24, 26, 27, 30, 33, 36, 39, 27), False),  # the garbage collector has closed them
    ],
)
def test_a_leak_repeats_at_each_restart(
    tmp_path: Path, counts: tuple[int, ...], grows: bool
) -> None:
    records = Records(tmp_path)
    for iteration, count in enumerate(counts):
        entry = Entry(pid=7, rank=0, iteration=iteration, descriptors={"socket": count}, threads=5)
        records.write(entry)
    assert bool(leaks(tmp_path)) == grows


def test_a_checkpoint_before_the_first_step_is_complete(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    made.save(storage, 0)
    (tmp_path / ".tmp-step-00000003-x").mkdir()
    assert unfinished_checkpoints(tmp_path) == [".tmp-step-00000003-x: not committed"]
