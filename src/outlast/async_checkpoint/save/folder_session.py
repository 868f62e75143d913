"""The session of a process with one folder of checkpoints: the writer, the buffers, the lock.

It is created with the first checkpointer for a folder, and taken over by the next one for the same
folder in this process: a training function that is restarted in place creates a new checkpointer,
and finds the buffers allocated, the writer running and the last snapshots still in memory.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

from outlast.async_checkpoint.environment import events_folder, runtime_folder
from outlast.async_checkpoint.peer_copies.arrangement import KeeperClient
from outlast.async_checkpoint.peer_copies.mirror import Mirrors
from outlast.async_checkpoint.peer_copies.rounds import CopyRounds
from outlast.async_checkpoint.save.structures import StructureMemo
from outlast.async_checkpoint.snapshot.buffers import BufferPool
from outlast.async_checkpoint.storage.directory import open_storage
from outlast.async_checkpoint.storage.fence import Credentials
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import SnapshotDescription, take_over
from outlast.coordination.training_step import reserve_observers
from outlast.events.emitter import JsonlSink, Sink
from outlast.system.shared_memory import SharedMemory

# The writer completes its last request in that time (at most ten seconds of it), and deletes the
# recycled files: that takes seconds on a busy disk.
_AT_EXIT_S = 20.0
# A restart must not wait for a slow disk to make dropped files durable.
_FOR_WRITER_S = 0.2
_OWN = "own"

_sessions: dict[str, FolderSession] = {}
_lock = threading.Lock()


class FolderSession:
    """See the module. One checkpointer, its `owner`, uses it at a time. `linger_s` is how long the
    snapshots outlive this process. Another folder of the same name has a different `identity`.
    `overlaps`: whether tensors may be copied during training; until that has torn a snapshot.
    `recycles`: whether this process has removed checkpoints: the recycled files are its own then,
    and it deletes them at its end, whichever rank it is by then. `keeper` and `copies` copy the
    snapshots to another host, and hold those of others. `kept` is memory that the writer keeps for
    a replacement of this process, `inherited` what a dead process of this rank has left of it, and
    `mirrors` are those of what other ranks keep so, on other hosts.
    `dropped` are the snapshots of saves that a fault has cut off, by id: see `left_saves.py`.
    """

    def __init__(self, url: str, threads: int, linger_s: float, replicas: int) -> None:
        self.url = url
        self.options = (threads, linger_s, replicas)
        self.storage = open_storage(url)
        self.locked = False
        self.overlaps, self.recycles = True, False
        self.identity = ""
        self.credentials = Credentials()  # on rank 0
        self.owner: Any = None  # a `Checkpointer`, whose module imports this one
        self.closing = False
        self.writer = WriterClient(
            {"url": url, "threads": threads, "linger_s": linger_s, "launcher": os.getppid()}
        )
        self.keeper = KeeperClient.of_folder(url, linger_s) if replicas else None
        self.copies: CopyRounds | None = None
        self.memo = StructureMemo()
        self.pool = BufferPool(self.writer)
        self.dropped: dict[str, SnapshotDescription] = {}
        self.kept: SharedMemory | None = None
        self.inherited: SharedMemory | None = None
        self.mirrors = Mirrors(lambda memory, n: self.writer.keep(memory, str(self.own_socket), n))
        self._sink: Sink | None = None
        # At exit, the program says goodbye to the writer, which would otherwise linger.
        atexit.register(self._close_at_exit)
        reserve_observers.append(self._go_into_reserve)

    def sink(self, rank: int) -> Sink | None:
        """The default sink of events: one file for each process, which all its checkpointers for
        this folder share. The rank of the first of them is in its name.
        """
        folder = events_folder()
        if self._sink is None and folder:
            self._sink = JsonlSink(Path(folder) / f"checkpoint{rank}-{os.getpid()}.jsonl")
        return self._sink

    @property
    def own_socket(self) -> Path:
        """That at which the writer of this process waits for its replacement."""
        _, rank, world_size = self.memo.ranks
        return self.socket_path(rank, world_size)

    def socket_path(self, rank: int, world_size: int) -> Path:
        """The socket at which the writer of a dead process waits for the replacement of a rank."""
        name = checksum(f"{self.url}\0{rank}\0{world_size}".encode())
        return runtime_folder() / f"{name}.sock"

    def take_over(self) -> None:
        """Takes over what a dead process of this rank has left, in whose place this one keeps its
        own.
        """
        path = self.own_socket
        found = self.pool.take_over(path)
        left = [each.snapshot for each in self.pool.handed_over if each.snapshot is not None]
        self.dropped.update({each["save_id"]: each for each in left})
        if _OWN in found:
            self.release_inherited()
            self.inherited = found.pop(_OWN)
        self.mirrors.adopt(found)
        # What was inherited must survive the death of this process too, until there is a newer one.
        kept = self.kept if self.kept is not None else self.inherited
        if kept is not None:
            self.writer.keep(kept, str(path), _OWN)

    @property
    def memories(self) -> list[SharedMemory]:
        """What was kept by this process, before a restart in place, and by a process of this rank
        that was killed.
        """
        return [each for each in (self.kept, self.inherited) if each is not None]

    def left_by(self, rank: int, world_size: int) -> list[SharedMemory]:
        """What a dead process of another rank, on this host, has kept for its replacement; once."""
        snapshots, kept = take_over(self.socket_path(rank, world_size))
        for each in snapshots:
            each.memory.close()
        return list(kept.values())

    def keep(self, memory: SharedMemory) -> None:
        """Keeps `memory` after a kill of this process, for its replacement. What was kept before is
        released.
        """
        before, self.kept = self.kept, memory
        self.writer.keep(memory, str(self.own_socket), _OWN)
        if before is not None and before is not memory:
            before.close()
        self.release_inherited()

    def release_inherited(self) -> None:
        memory, self.inherited = self.inherited, None
        if memory is not None:
            memory.close()

    def end_owner(self) -> None:
        """Ends the checkpointer of an iteration that is over."""
        if self.owner is not None:
            self.owner._drop()  # even after an abort, which an interrupt may cut short
            self.writer.await_idle(_FOR_WRITER_S)
        self.pool.give_back_all()

    def unlock(self) -> None:
        """On a rank other than 0: this process may have been that before."""
        if self.locked:
            self.storage.unlock()
            self.locked = False

    def _go_into_reserve(self) -> None:
        self.end_owner()
        self.unlock()
        self.mirrors.close()

    @property
    def outlives_program(self) -> bool:
        """Whether the snapshots stay for a replacement, as after a kill: with copies on other
        hosts, if the program ends by an exception. The loss of a host is one on all other ranks,
        and without a wrapper they are all started again.
        """
        return self.keeper is not None and getattr(sys, "last_value", None) is not None

    def _close_at_exit(self) -> None:
        if not self.outlives_program:
            self.close(_AT_EXIT_S)

    def close(self, timeout_s: float) -> None:
        """Ends the writer and gives all memory back.

        A restart in place may interrupt this anywhere. So every part of it may be repeated, and
        `closing` stays set: the next checkpointer for the folder, or else the end of the program,
        completes it. Without that, a writer that got no goodbye would linger for a replacement.
        """
        self.closing = True
        self.pool.end_copies()  # their memory is released below
        if self.copies is not None:
            self.copies.close()
        if self.keeper is not None:
            self.keeper.close(timeout_s)  # a round that waits for it ends
        if self.copies is not None:
            self.copies.join()
        self.mirrors.close()
        self.writer.close(timeout_s, self.credentials, tidy=self.recycles, last=self.locked)
        self.pool.close()
        self.release_inherited()
        if self.kept is not None:
            self.kept.close()
            self.kept = None
        self.storage.close()
        self.locked = False
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        with _lock:
            if _sessions.get(self.url) is self:
                del _sessions[self.url]
        if self._go_into_reserve in reserve_observers:
            reserve_observers.remove(self._go_into_reserve)
        atexit.unregister(self._close_at_exit)  # last: see above


def session_for(
    url: str, *, threads: int, linger_s: float, replicas: int
) -> tuple[FolderSession, bool]:
    """The session of a folder, and whether it existed before. One with other options ends, as does
    one whose end was interrupted. A `ValueError` if its checkpointer is in use.
    """
    present = _sessions.get(url)
    owner = None if present is None else present.owner
    if owner is not None and owner.in_use:
        raise ValueError(
            f"this process already has a Checkpointer (or a Job) for {url}: use that one, or "
            "close() it before you create another"
        )
    options = (threads, linger_s, replicas)
    if present is not None and (present.closing or present.options != options):
        if owner is not None:
            owner.abort()
        present.close(0.0)
    with _lock:
        if url in _sessions:
            return _sessions[url], True
        session = _sessions[url] = FolderSession(url, *options)
        return session, False
