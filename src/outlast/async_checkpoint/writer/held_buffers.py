"""The snapshot buffers of the main process, as its writer holds them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from outlast.async_checkpoint.writer.handover import SnapshotDescription, StoredSnapshot
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.system.shared_memory import SharedMemory


@dataclasses.dataclass
class _Copy:
    """The copy of one snapshot: every byte of the buffer before `upto` is final."""

    upto: int = 0
    torn: bool = False  # it will not be completed


@dataclasses.dataclass
class HeldBuffer:
    """One buffer and the snapshot in it.

    Attributes:
        memory: `None` before it is handed over.
        index: describes what a snapshot in it holds, and where.
        snapshot, values: the sealed snapshot, and its pickled values.
        written: the save that was last written from it, and the checksums that were taken then.
        copies: the copies into it, by the ids of their saves.
    """

    memory: SharedMemory | None = None
    index: str = ""
    snapshot: SnapshotDescription | None = None
    values: bytes = b""
    written: tuple[str, dict[str, Any]] = ("", {})
    copies: dict[str, _Copy] = dataclasses.field(default_factory=dict)

    def copy_of(self, save_id: str) -> _Copy:
        """The copy of a save. Two threads ask; both get the same object."""
        return self.copies.setdefault(save_id, _Copy())


class HeldBuffers:
    """All held buffers, by number. `dropped` is set when what is being written is dropped.

    The writer writes during a copy. When a writer dies, its knowledge of copies is lost; the main
    process says again to its replacement how they ended, so no wait for a copy lasts forever.
    """

    def __init__(self) -> None:
        self.dropped = threading.Event()
        self._buffers: dict[int, HeldBuffer] = {}
        self._changed = threading.Condition()

    def __getitem__(self, number: int) -> HeldBuffer:
        return self._buffers.setdefault(number, HeldBuffer())

    def reached(self, number: int, save_id: str, upto: int) -> None:
        with self._changed:
            copy = self[number].copy_of(save_id)
            copy.upto = max(copy.upto, upto)
            self._changed.notify_all()

    def tear(self, number: int, save_id: str) -> None:
        with self._changed:
            self[number].copy_of(save_id).torn = True
            self._changed.notify_all()

    def filled(self, number: int, save_id: str) -> Callable[[int], bool]:
        """A wait until the copy of a save has reached an offset; `False` if it never will."""
        copy = self[number].copy_of(save_id)

        def wait_for(upto: int) -> bool:
            with self._changed:
                self._changed.wait_for(
                    lambda: copy.upto >= upto or copy.torn or self.dropped.is_set()
                )
                return copy.upto >= upto and not copy.torn and not self.dropped.is_set()

        return wait_for

    def drop(self) -> None:
        with self._changed:
            self.dropped.set()
            self._changed.notify_all()

    def invalidate(self, number: int) -> None:
        """Forgets the snapshot in a buffer, and ends every wait for more of it."""
        buffer = self[number]
        buffer.snapshot, buffer.written = None, ("", {})
        with self._changed:
            while buffer.copies:
                buffer.copies.popitem()[1].torn = True
            self._changed.notify_all()

    def share(self, number: int, memory: SharedMemory, index: str) -> None:
        self.release(number)
        self._buffers[number] = HeldBuffer(memory, index)

    def release(self, number: int) -> None:
        self.invalidate(number)
        memory = self._buffers.pop(number).memory
        if memory is not None:
            memory.close()

    def stored(self) -> list[StoredSnapshot]:
        found: list[StoredSnapshot] = []
        for number, buffer in list(self._buffers.items()):
            snapshot, memory = buffer.snapshot, buffer.memory
            if snapshot is None or memory is None or not memory.intact:
                continue
            added: Any = {"buffer": number, "index": buffer.index}
            stored = StoredSnapshot({**snapshot, **added}, buffer.values, memory)
            written_as, files = buffer.written
            if snapshot.get("files") is None:  # sealed without checksums
                same = written_as == snapshot["save_id"]
                snapshot["files"] = files if same else checksums_of(stored.parts)
            stored.description["files"] = snapshot["files"]
            found.append(stored)
        return found
