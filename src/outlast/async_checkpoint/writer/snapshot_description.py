"""The description of a snapshot: JSON that the writer keeps and a replacement process reads.

Nothing here imports torch: the writer process runs without it.
"""

from __future__ import annotations

from typing import Any, TypedDict


class _Outcome(TypedDict, total=False):
    files: dict[str, dict[str, Any]] | None
    committed: bool


class SnapshotDescription(_Outcome):
    """Describes one snapshot.

    Attributes:
        step: of the training.
        number: counts the saves of its checkpointer.
        save_id: identifies the save; the same on all ranks.
        folder_id: identifies the folder of checkpoints.
        rank, world_size: of the checkpointer.
        working, final: the folder of the checkpoint, before and after the commit.
        layout: name, offset in the buffer and size of each file of tensors.
        values: the file of the pickled values; empty if there are none.
        places: offset and size of each value in that file.
        socket: where the writer waits for a replacement of the main process.
        files: `size_bytes` and `checksums` of each file, once they are known.
        committed: set once the checkpoint is committed.
    """

    step: int
    number: int
    save_id: str
    folder_id: str
    rank: int
    world_size: int
    working: str
    final: str
    layout: list[tuple[str, int, int]]
    values: str
    places: list[list[int]]
    socket: str


class HeldSnapshot(SnapshotDescription):
    """A snapshot in memory, as listed by the writer.

    Attributes:
        buffer: the number of its buffer.
        index: what it holds, and where (`Structure.index`).
    """

    buffer: int
    index: str
