"""Saves with a metric that a restart has cut off, and which are completed after it.

After a restart training continues from a newer state than that of a save in progress: most such
saves are dropped. But one with a metric may be the best of the training, and no later save has its
state. Its snapshots are still in memory: of a process that lives in its buffer, of one that was
killed with its writer.

The ranks compare them in the first step of a restore. A save is whole if every rank has the sealed
snapshot of one save id, step and place: then its announcements (`round.py`) would have agreed. It
is written and committed again under another id, so into another folder, because a process or a
writer that is cut off may still be committing it; the content is the same, whichever is last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from outlast.async_checkpoint.save.folder_session import FolderSession


@dataclasses.dataclass(frozen=True)
class LeftSave:
    """What a rank has of a save that was cut off; of all ranks, once they have compared.

    Attributes:
        number: counts the saves of its checkpointer.
        is_whole: whether this rank has its sealed snapshot; of all ranks, whether it can be
            completed.
        is_committed: as far as this rank knows.
    """

    save_id: str
    step: int
    place: str
    number: int
    metric: float | None
    is_whole: bool
    is_committed: bool


def left_by(session: FolderSession, rank: int, world_size: int) -> list[LeftSave]:
    """What this rank has of the saves that were in progress; once."""
    dropped, session.dropped = session.dropped, {}
    sealed = {b.snapshot["save_id"] for b in session.pool.all_buffers if b.snapshot is not None}
    place = rank, world_size, session.identity
    return [
        LeftSave(
            save_id,
            each["step"],
            each.get("place", ""),
            each["number"],
            each.get("metric"),
            save_id in sealed and (each["rank"], each["world_size"], each["folder_id"]) == place,
            each.get("committed", False),
        )
        for save_id, each in dropped.items()
    ]


def compared(
    parts: Sequence[Sequence[Any]], is_committed: Callable[[int, str], bool]
) -> list[LeftSave]:
    """The saves with a metric that were in progress and are not committed, in their order, from
    what each rank has `left_by`. `is_committed` looks for a save of this step and id on storage.
    """
    by_id: dict[str, list[LeftSave]] = {}
    for part in parts:
        for each in msgspec.convert(part, list[LeftSave]):
            by_id.setdefault(each.save_id, []).append(each)
    found = []
    for save_id, held in by_id.items():
        metric = next((each.metric for each in held if each.metric is not None), None)
        places = {(each.step, each.place) for each in held}
        if metric is None or len(places) > 1 or any(each.is_committed for each in held):
            continue
        if is_committed(held[0].step, save_id):
            continue
        is_whole = len(held) == len(parts) and all(each.is_whole for each in held)
        found.append(dataclasses.replace(held[0], metric=metric, is_whole=is_whole))
    return sorted(found, key=lambda each: each.number)
