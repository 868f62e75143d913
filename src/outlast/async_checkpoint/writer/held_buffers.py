"""The snapshot buffers of the main process, as its writer holds them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from outlast.async_checkpoint.writer.handover import HandedOver
from outlast.async_checkpoint.writer.messages import HeldSnapshot, SnapshotDescription
from outlast.async_checkpoint.writer.write_files import checksums_of
from outlast.system.shared_memory import SharedMemory


class CopyProgress:
    """The progress of the copy of one snapshot: the writer writes during the copy.

    When a writer dies, its knowledge of copies is lost. The main process sends `SnapshotSealed` and
    `SnapshotTorn` again to its replacement, so no wait for a copy lasts forever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._torn = False

    def reached(self, upto: int) -> None:
        """Every byte of the buffer before `upto` is final."""
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def tear(self) -> None:
        """The copy will not be completed."""
        with self._changed:
            self._torn = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes every `wait_for` check its conditions again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, upto: int, dropped: threading.Event) -> bool:
        """Waits until the copy has reached `upto`; `False` if it never will, or was dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._upto >= upto or self._torn or dropped.is_set())
            return self._upto >= upto and not self._torn and not dropped.is_set()


@dataclasses.dataclass
class HeldBuffer:
    """One buffer and the snapshot in it.

    Attributes:
        memory: `None` before it is handed over.
        index: describes what a snapshot in it holds, and where.
        snapshot, values: the sealed snapshot, and its pickled values.
        written: the save that was last written from it, and the checksums that were taken then.
    """

    memory: SharedMemory | None = None
    index: bytes = b""
    snapshot: SnapshotDescription | None = None
    values: bytes = b""
    written: tuple[str, dict[str, Any]] | None = None
    progress: dict[str, CopyProgress] = dataclasses.field(default_factory=dict)

    def invalidate(self) -> None:
        """Forgets the snapshot, and ends every wait for more of it."""
        self.snapshot = self.written = None
        for save_id in list(self.progress):
            self.progress.pop(save_id).tear()

    def close(self) -> None:
        """Releases the memory."""
        self.invalidate()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()

    def progress_of(self, save_id: str) -> CopyProgress:
        """The progress of the copy of a save. Two threads ask; both get the same object."""
        return self.progress.setdefault(save_id, CopyProgress())

    def take_checksums(self) -> None:
        """Gives the snapshot the checksums that it was written with. The thread that seals and the
        thread that writes both call this after they have set their half, in either order: the
        later one finds both halves.
        """
        snapshot, written = self.snapshot, self.written
        if snapshot is not None and written is not None and snapshot["save_id"] == written[0]:
            snapshot["files"] = written[1]


class HeldBuffers:
    """All held buffers, by number."""

    def __init__(self) -> None:
        self._buffers: dict[int, HeldBuffer] = {}

    def __getitem__(self, number: int) -> HeldBuffer:
        return self._buffers.setdefault(number, HeldBuffer())

    def release(self, number: int) -> None:
        """Releases a buffer."""
        self[number].close()
        del self._buffers[number]

    def wake_all(self, dropped: threading.Event) -> None:
        """Sets `dropped`, and makes every wait for a copy check it."""
        dropped.set()
        for buffer in list(self._buffers.values()):
            for progress in list(buffer.progress.values()):
                progress.wake()

    def described(self) -> list[HeldSnapshot]:
        """The snapshots that are complete, with their checksums."""
        found: list[HeldSnapshot] = []
        for number, buffer in list(self._buffers.items()):
            snapshot, memory = buffer.snapshot, buffer.memory
            if snapshot is None or memory is None or not memory.intact:
                continue
            if snapshot.get("files") is None:  # sealed, but not yet written and hashed
                values = {snapshot["values"]: buffer.values} if snapshot["values"] else {}
                snapshot["files"] = checksums_of(memory.view, snapshot["layout"], values)
            found.append({**snapshot, "buffer": number, "index": buffer.index.decode()})
        return found

    def handover(self) -> list[HandedOver]:
        """The snapshots for a replacement of the main process."""
        found = []
        for snapshot in self.described():
            buffer = self._buffers[snapshot["buffer"]]
            assert buffer.memory is not None
            found.append(HandedOver(snapshot, buffer.values, buffer.memory.descriptor))
        return found
