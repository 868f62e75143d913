"""The checks of a round, on records: steps that are missing, descriptors that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_checkpoint import made
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.campaign.notes import ENTRY, STEP, notes_in
from outlast.campaign.plan import RoundPlan
from outlast.campaign.programs import Program
from outlast.campaign.round import leaks, unfinished_checkpoints
from outlast.events.emitter import JsonlSink
from outlast.events.event import Note


def write_notes(folder: Path, *notes: Note) -> None:
    sink = JsonlSink(notes_in(folder / "work"))
    for note in notes:
        sink.write(note)
    sink.close()


def test_a_step_that_another_rank_has_completed_may_lack_its_record(tmp_path: Path) -> None:
    """The rank died before it wrote the record, and continued from the other rank's state."""
    notes = [
        Note(name=STEP, rank=rank, data={"step": step, "loss": "0x1p+0"})
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    own, plan = Program(["training"], own=True), RoundPlan(seed=1, number=1, ranks=2, steps=3)
    for name, some in (("all", notes), ("one", notes[:5]), ("none", notes[:4])):
        write_notes(tmp_path / name, *some)
    expected = own.reference([tmp_path / "all"])
    assert own.differences(expected, tmp_path / "one", plan) == []
    assert own.differences(expected, tmp_path / "none", plan) == ["step 3 is missing"]


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
    for count in counts:
        data = {"descriptors": {"socket": count}, "threads": 5}
        write_notes(tmp_path, Note(name=ENTRY, pid=7, rank=0, data=data))
    assert bool(leaks(tmp_path)) == grows


def test_a_checkpoint_before_the_first_step_is_complete(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    made.save(storage, 0)
    (tmp_path / ".tmp-step-00000003-x").mkdir()
    assert unfinished_checkpoints(tmp_path) == [".tmp-step-00000003-x: not committed"]
