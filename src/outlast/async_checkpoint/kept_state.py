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
from outlast.async_checkpoint.storage.system_errors import NO_ROOM as NO_ROOM
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointRestored
from outlast.system.shared_memory import SharedMemory


class KeptState:
    """One rank's part. `url` is the folder of the checkpoints, in the form in which it is unique;
    `timeout_s`, how long to wait for other ranks.
    """

    def __init__(
        self, session: FolderSession, restorer: Restorer, saves: Saves, emitter: Emitter
    ) -> None:
        self._session, self._restorer, self._saves = session, restorer, saves
        self._emitter = emitter
        self.url, self.timeout_s = session.url, session.writer.timeout_s

    @property
    def memories(self) -> list[SharedMemory]:
        return self._session.memories

    @property
    def restored_from(self) -> str:
        """Where the state was found that was last restored: "storage", "memory", "copies" on other
        hosts, or the caller's own source; empty if none was found.
        """
        return self._restorer.restored_from

    @property
    def lacking(self) -> list[tuple[Any, ...]]:
        """The paths of what the last restore from a checkpoint has not found in it."""
        return self._restorer.lacking

    def restores_no_live(self, why: str) -> None:
        """Why a checkpoint is restored next, and not a state that the caller has kept."""
        self._restorer.not_live = why

    def keep(self, memory: SharedMemory) -> None:
        """Keeps `memory` after a kill of this process, for its replacement. What was kept before is
        released.
        """
        self._session.keep(memory)

    def held(self, after: int = -1) -> Any:
        """What this rank has in memory, of later steps than `after`: plain JSON, for `sort`."""
        return self._restorer.held(after)

    def sort(self, step: int | None, held: list[Any]) -> Any:
        """On rank 0: which checkpoints there are, on storage and in the memory of all ranks."""
        return self._restorer.sort(step, held)

    def looked(self, answer: Any, step: int | None) -> int | None:
        """Takes the answer of `sort` on each rank: the next restore of `step` uses it. Returns the
        step of the newest checkpoint, or `step` if there is that one. It may be damaged.
        """
        return self._restorer.looked(answer, step)

    def newest(self, after: int, step: int | None = None) -> int | None:
        """The same of later steps than `after`, in a round of its own. All ranks call this."""
        ranks = self._restorer.ranks
        with ranks.operation():
            answer = ranks.gather(self.held(after), lambda held: self.sort(step, held))
        newest = self.looked(answer, step)
        self._restorer.forget()
        return newest if newest is not None and newest > after else None

    def restored(
        self, state_dict: Mapping[str, Any], step: int, source: str, seconds: float, size_bytes: int
    ) -> None:
        """The caller has restored `state_dict` by itself, from `source`; `size_bytes` were received
        from other ranks. All ranks call this.
        """
        self._restorer.restored_from = source
        self._restorer.forget()
        self._emitter.emit(
            CheckpointRestored(step=step, source=source, seconds=seconds, fetched_bytes=size_bytes)
        )
        self._saves.prepare(state_dict)
