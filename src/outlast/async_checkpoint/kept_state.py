"""`KeptState`: for a caller of a checkpointer that keeps the newest state in memory by itself.

After a fault such a caller may restore a newer state than any checkpoint has. The checkpointer
keeps a small memory for it that survives a kill of the process, says whether a checkpoint is newer,
and treats the state that the caller has restored like one that it has loaded itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.async_checkpoint.restore.restorer import Restorer
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.saves import Saves
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointRestored
from outlast.system.shared_memory import SharedMemory


class KeptState:
    """One rank's part."""

    def __init__(
        self, session: FolderSession, restorer: Restorer, saves: Saves, emitter: Emitter
    ) -> None:
        self._session, self._restorer, self._saves = session, restorer, saves
        self._emitter = emitter

    @property
    def memories(self) -> list[SharedMemory]:
        """What was kept by this process, before a restart in place, and by a process of this rank
        that was killed.
        """
        found = (self._session.kept, self._session.inherited)
        return [memory for memory in found if memory is not None]

    @property
    def restored_from(self) -> str:
        """Where the state was found that was last restored: "storage", "memory", "copies" on other
        hosts, or the caller's own source; empty if none was found.
        """
        return self._restorer.restored_from

    @property
    def timeout_s(self) -> float:
        """How long to wait for other ranks."""
        return self._session.writer.timeout_s

    @property
    def url(self) -> str:
        """The folder of the checkpoints, in the form in which it is unique."""
        return self._session.url

    @property
    def not_live(self) -> str:
        """Why a checkpoint is restored, and not a state that the caller has kept."""
        return self._restorer.not_live

    @not_live.setter
    def not_live(self, reason: str) -> None:
        self._restorer.not_live = reason

    def keep(self, memory: SharedMemory) -> None:
        """Keeps `memory` after a kill of this process, for its replacement. What was kept before is
        released.
        """
        ranks = self._restorer.ranks
        self._session.keep(memory, self._session.socket_path(ranks.rank, ranks.world_size))

    def newest(self, after: int) -> int | None:
        """The step of the newest checkpoint, on storage or in memory, that is later than `after`.
        All ranks call this, and get the same answer. It may turn out to be damaged.
        """
        restorer = self._restorer
        with restorer.ranks.operation():
            found = restorer.candidates(restorer.snapshots(after), None)
        return found[0].step if found and found[0].step > after else None

    def restored(
        self, state_dict: Mapping[str, Any], step: int, source: str, seconds: float, size_bytes: int
    ) -> None:
        """The caller has restored `state_dict` by itself, from `source`; `size_bytes` were received
        from other ranks. All ranks call this.
        """
        self._restorer.restored_from = source
        self._emitter.emit(
            CheckpointRestored(step=step, source=source, seconds=seconds, fetched_bytes=size_bytes)
        )
        self._saves.prepare(state_dict)
