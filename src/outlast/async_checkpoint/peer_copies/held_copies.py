"""The copies that a keeper holds: at most two for each rank, the older one complete everywhere.

A rank sends the copy of a save only once the copies of the save before have ended on all ranks, and
every keeper has released what that made superfluous (`rounds.py`). So a keeper that is sent a copy
holds one complete copy of that rank, besides the one that is arriving.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection
from pathlib import Path

from outlast.async_checkpoint.peer_copies.messages import SentSnapshot
from outlast.system.shared_memory import SharedMemory


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """A complete copy: the snapshot's description, with its checksums, and its bytes."""

    snapshot: SentSnapshot
    values: bytes
    memory: SharedMemory

    @property
    def key(self) -> tuple[str, int]:
        """The save and the rank."""
        return self.snapshot["save_id"], self.snapshot["rank"]


class HeldCopies:
    """All copies of a keeper. Any thread may use it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], HeldCopy] = {}
        self._lock = threading.Lock()

    def all(self) -> list[HeldCopy]:
        """The copies, the oldest first."""
        with self._lock:
            return list(self._copies.values())

    def find(self, save_id: str, rank: int) -> HeldCopy | None:
        """The copy of a rank's snapshot of a save."""
        with self._lock:
            return self._copies.get((save_id, rank))

    def add(self, copy: HeldCopy) -> None:
        """Adds a complete copy; it replaces one of the same save and rank."""
        with self._lock:
            before = self._copies.pop(copy.key, None)
            self._copies[copy.key] = copy
        if before is not None:
            before.memory.close()

    def keep_only(self, save_ids: Collection[str]) -> None:
        """Releases the copies of other saves."""
        self._release([copy for copy in self.all() if copy.snapshot["save_id"] not in save_ids])

    def make_room(self, rank: int, folder_id: str) -> None:
        """Before a copy of this rank arrives: releases all but the newest one of that rank. There
        are more only after a fault that came before `keep_only`.
        """
        mine = [
            copy
            for copy in self.all()
            if (copy.snapshot["rank"], copy.snapshot["folder_id"]) == (rank, folder_id)
        ]
        self._release(mine[:-1])

    def _release(self, copies: Collection[HeldCopy]) -> None:
        with self._lock:
            released = [self._copies.pop(copy.key, None) for copy in copies]
        for copy in released:
            if copy is not None:
                copy.memory.close()


def available_bytes() -> int | None:
    """How much memory the system can give without swapping; `None` if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None
