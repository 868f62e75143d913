"""What a process keeps for one folder of checkpoints: the writer, the arenas, the lock.

Made with the first checkpointer for a folder, and taken over by the next one for the same folder in
this process: a training function that is restarted in place makes its checkpointer anew, and finds
the buffers allocated, the writer running and the last snapshots still in memory.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outlast.async_checkpoint.environment import events_folder, runtime_folder
from outlast.async_checkpoint.save.structure_exchange import Agreed
from outlast.async_checkpoint.snapshot.copy_now import EagerCopy
from outlast.async_checkpoint.snapshot.copy_overlapped import Guard
from outlast.async_checkpoint.snapshot.shared_memory import Arena, populate
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict.memo import Described
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.async_checkpoint.storage.protocol import open_storage
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.handover import claim
from outlast.events import JsonlSink, Sink

__all__ = ["Engine", "Slot", "engine_for"]

_engines: dict[str, Engine] = {}
_lock = threading.Lock()


@dataclasses.dataclass
class Slot:
    """Room for one snapshot.

    Attributes:
        number: names it in the writer.
        arena: the memory; none before the first use.
        structure: what its frames were made for.
        targets: tensors that look into it.
        busy: whether a save is using it.
        snapshot: what lies in it, once it is sealed.
        values: and what belongs to it that is no tensor.
        guard: copies into it.
        turn: counts its users; one of the past cannot give it back.
    """

    number: int
    arena: Arena | None = None
    structure: Structure | None = None
    targets: Sequence[torch.Tensor] = ()
    busy: bool = False
    snapshot: dict[str, Any] | None = None
    values: bytes = b""
    guard: Guard | EagerCopy | None = None
    turn: int = 0


class Engine:
    """See the module. Not for use by two checkpointers at a time.

    Args:
        url: of the folder.
        threads: that the writer writes with.
        linger_s: how long the snapshots outlive this process, in seconds.
    """

    def __init__(self, url: str, *, threads: int, linger_s: float) -> None:
        self.url = url
        self.storage = open_storage(url)
        self.locked = False
        self.identity = ""
        self.owner: Any = None  # the checkpointer that uses it
        self.writer = WriterClient(
            {"url": url, "threads": threads, "linger_s": linger_s, "launcher": os.getppid()}
        )
        self.described = Described()
        self.agreed = Agreed()
        self.slots: list[Slot] = []
        self.inherited: list[Slot] = []
        self._sink: Sink | None = None
        self._freed = threading.Condition()
        self._allocating: threading.Thread | None = None
        # A program that ends says goodbye to the writer, which would linger otherwise.
        atexit.register(self.close, 1.0)

    def sink(self, rank: int) -> Sink | None:
        """Where events go that have no other place: one file a process, however many checkpointers
        follow each other in it.

        Args:
            rank: of the first of them; it is in the name of the file.
        """
        folder = events_folder()
        if self._sink is None and folder:
            self._sink = JsonlSink(Path(folder) / f"checkpoint{rank}-{os.getpid()}.jsonl")
        return self._sink

    def socket_path(self, rank: int, world_size: int) -> Path:
        """Where a dead main process's writer waits for the next one of this rank."""
        name = checksum(f"{self.url}\0{rank}\0{world_size}".encode())
        return runtime_folder() / f"{name}.sock"

    def inherit(self, rank: int, world_size: int) -> None:
        """Takes what a dead process of this rank left in memory."""
        found = claim(self.socket_path(rank, world_size))
        if found:
            self.writer.start()
        for bequest in found:
            number = 1000 + len(self.inherited)
            arena = Arena(os.fstat(bequest.descriptor).st_size, bequest.descriptor)
            slot = Slot(number, arena, snapshot=bequest.snapshot, values=bequest.values)
            self.inherited.append(slot)
            self.writer.give(number, arena, bequest.snapshot["index"].encode())
            self.writer.tell(
                {"op": "sealed", "arena": number, "snapshot": bequest.snapshot}, bequest.values
            )

    def unlock(self) -> None:
        """Lets another process have the folder's lock, if this one holds it."""
        if self.locked:
            self.storage.unlock()
            self.locked = False

    def resize(self, count: int) -> None:
        """Has `count` slots."""
        while len(self.slots) < count:
            self.slots.append(Slot(len(self.slots)))

    def take(self, structure: Structure) -> Slot:
        """A slot for a snapshot of this structure; waits for one to be free."""
        with self._freed:
            self._freed.wait_for(lambda: any(not slot.busy for slot in self.slots))
            free = [slot for slot in self.slots if not slot.busy]
            # One that fits, if there is one; and then the one whose snapshot is older.
            slot = min(free, key=lambda s: (s.structure is not structure, _age(s)))
            slot.busy = True
            slot.turn += 1
        try:
            self._fit(slot, structure)
        except BaseException:
            self.give_back(slot)
            raise
        return slot

    def prepare(self, structure: Structure) -> None:
        """Allocates the memory for snapshots of this structure beside what comes next: the first
        save then costs as little as the others. What lies in memory already stays there.
        """
        with self._freed:
            fresh = [slot for slot in self.slots if slot.arena is None and not slot.busy]
            for slot in fresh:
                slot.busy = True
        if not fresh:
            return

        def allocate() -> None:
            for slot in fresh:
                try:
                    self._fit(slot, structure)
                finally:
                    self.give_back(slot)

        self.writer.start()
        self._allocating = threading.Thread(target=allocate, name="outlast-allocate", daemon=True)
        self._allocating.start()

    def _await_allocation(self) -> None:
        if self._allocating is not None:
            self._allocating.join()

    def give_back(self, slot: Slot, turn: int | None = None) -> None:
        """The save does not need it any more; nothing, if `turn` is not the present one."""
        with self._freed:
            if turn is not None and turn != slot.turn:
                return
            if slot.guard is not None:
                slot.guard.call_off()  # nothing more is copied into what others may take
                slot.guard = None
            slot.busy = False
            self._freed.notify_all()

    def give_back_all(self) -> None:
        """No save is under way any more."""
        self._await_allocation()
        with self._freed:
            for slot in self.slots:
                if slot.guard is not None:
                    slot.guard.call_off()
                    slot.guard = None
                slot.busy = False
                slot.turn += 1
            self._freed.notify_all()

    def forget_inherited(self) -> None:
        """The snapshots of a dead predecessor are of no use any more: there is a newer state."""
        for slot in self.inherited:
            self.writer.tell({"op": "release", "arena": slot.number})
            self.writer.forget(slot.number)
            if slot.arena is not None:
                slot.arena.close()
        self.inherited = []

    def _fit(self, slot: Slot, structure: Structure) -> None:
        # Before the first byte is overwritten: see `writer_main`.
        slot.snapshot = None
        self.writer.tell({"op": "reuse", "arena": slot.number})
        if slot.structure is structure:
            return
        slot.targets = ()
        slot.structure = None
        needed = structure.layout.size_bytes
        if slot.arena is None or not needed <= slot.arena.size_bytes <= 2 * needed + (1 << 20):
            old, slot.arena = slot.arena, None
            if old is not None:
                self.writer.forget(slot.number)
                old.close()
            slot.arena = Arena(needed)
            populate(slot.arena)
            self._pin(slot.arena)
        self.writer.give(slot.number, slot.arena, structure.index)
        structure.layout.inscribe(slot.arena, structure.tensors)
        slot.targets = structure.targets(slot.arena)
        slot.structure = structure

    def _pin(self, arena: Arena) -> None:
        """Lets a GPU copy into it by itself, beside the program."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Without it copies are slower, but right; so an error is no reason to stop.
            torch.cuda.cudart().cudaHostRegister(arena.address, arena.size_bytes, 0)

    def close(self, timeout_s: float) -> None:
        """Ends the writer and gives all memory back."""
        atexit.unregister(self.close)
        self._await_allocation()
        for slot in self.slots:
            if slot.guard is not None:
                slot.guard.call_off()  # its memory goes
        self.writer.close(timeout_s)
        for slot in (*self.slots, *self.inherited):
            slot.targets = ()
            if slot.arena is not None:
                slot.arena.close()
        self.slots, self.inherited = [], []
        self.storage.close()
        self.locked = False
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        with _lock:
            if _engines.get(self.url) is self:
                del _engines[self.url]


def engine_for(url: str, *, threads: int, linger_s: float) -> tuple[Engine, bool]:
    """The engine for a folder, and whether it was there before."""
    with _lock:
        if url in _engines:
            return _engines[url], True
        engine = Engine(url, threads=threads, linger_s=linger_s)
        _engines[url] = engine
        return engine, False


def _age(slot: Slot) -> int:
    return -1 if slot.snapshot is None else int(slot.snapshot["number"])
