"""`KeptState`: for a caller of a checkpointer that keeps the newest state in memory by itself.

After a fault such a caller may restore a newer state than any checkpoint has. The checkpointer
keeps a small memory for it that survives a kill of the process, says whether a checkpoint is newer,
and treats the state that the caller has restored like one that it has loaded itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from outlast.async_checkpoint.beside import Beside
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.restore.restorer import Restorer
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.left_saves import LeftSave
from outlast.async_checkpoint.save.saves import Saves
from outlast.async_checkpoint.storage.system_errors import NO_ROOM as NO_ROOM
from outlast.async_checkpoint.writer.handover import take_over
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointRestored
from outlast.system.notices import notice
from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.checkpoint")


class KeptState:
    """One rank's part. `resumes`: whether the caller calls `resume` after a restore. Otherwise the
    checkpointer does. `url` is the folder of the checkpoints, in the form in which it is unique;
    `timeout_s`, how long to wait for other ranks.
    """

    def __init__(
        self, session: FolderSession, restorer: Restorer, saves: Saves, emitter: Emitter
    ) -> None:
        self._session, self._restorer, self._saves = session, restorer, saves
        self._emitter = emitter
        self.resumes, self.url, self.timeout_s = False, session.url, session.writer.timeout_s

    @property
    def memories(self) -> list[SharedMemory]:
        """What was kept by this process, before a restart in place, and by a process of this rank
        that was killed.
        """
        found = (self._session.kept, self._session.inherited)
        return [memory for memory in found if memory is not None]

    def left_by(self, rank: int, world_size: int) -> SharedMemory | None:
        """What a dead process of another rank, on this host, has kept for its replacement; once."""
        snapshots, kept = take_over(self._session.socket_path(rank, world_size))
        for each in snapshots:
            each.memory.close()
        return kept

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
        ranks = self._restorer.ranks
        self._session.keep(memory, self._session.socket_path(ranks.rank, ranks.world_size))

    def beside(self, make: Callable[[], Beside]) -> None:
        """Calls `make` at each save, on the training thread: what it returns belongs to it."""
        self._saves.shared.beside = make

    def resume(
        self,
        step: int,
        sync: Callable[[], object] = lambda: None,
        finite: Callable[[], Collection[str]] = tuple,
    ) -> list[tuple[LeftSave, SaveHandle | None]]:
        """After a restore of `step`, on all ranks: completes the saves with a metric that were cut
        off before that; `sync` as in `Beside`. Returns them, without a handle if a rank has lost
        its snapshot.
        """
        left = self._restorer.take_left(step)
        if self._restorer.ranks.rank == 0:
            for each in left:
                if each.is_whole:
                    text = "completing the save of step %d, which a fault had cut off"
                    notice(log, text, each.step)
        return [
            (each, self._saves.resume(each, sync, finite()) if each.is_whole else None)
            for each in left
        ]

    def make_room(self, step: int, ends: float) -> None:
        """On rank 0, after a save of `step` failed: removes checkpoints that its commit would. It
        is given up at the monotonic time `ends`.
        """
        self._saves.outcomes.make_room(step, ends)

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
