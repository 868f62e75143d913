"""The state of one rank alone after a step: noted by value, and kept over a kill of the process.

It consists of the buffers of the model, which change during the forward pass and may differ between
replicas, and of what each `Part` calls its own. The shared memory has six slots: up to three for
the phases of the last completed step, and one each for the last phase of the step before, the
coming step, and what is being written: so a kill in the middle of a write costs nothing. (No rank
completes a step before all others have left the phases of the one before.) A checksum tells a slot
that was written in part. The last phase for which a state holds is one byte beside it.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.optim.swa_utils import AveragedModel

from outlast.async_checkpoint.subclasses import wraps
from outlast.elastic.job.encoding import load_plain, packed
from outlast.elastic.tensors import digest
from outlast.system.shared_memory import SharedMemory

_SLOTS = 6
_HEADER = struct.Struct("<QQQ")  # the order of writing, the size of the content, its checksum
_UNTIL = _HEADER.size  # where the last phase stands
_CONTENT = _UNTIL + 8
_LEAST_BYTES = 64 << 10
_SMALL_BYTES = 64 << 10  # of a buffer that is noted every time


class State(NamedTuple):
    """The name of a state, the same on all ranks: of two, the later one is greater."""

    step: int
    phase: int
    branch: str


@dataclasses.dataclass(frozen=True)
class Record:
    """Describes the state of one rank after `step` on `branch`."""

    branch: str
    step: int
    final: bool  # the step was completed; else noted during it, after `passes` backward passes
    rank: int  # the place of the process at that time
    world_size: int
    passes: int = 0
    phase: int = 0  # the first and the last phase of the step with this state
    until: int = 0

    def has(self, state: State) -> bool:
        is_of_step = self.step == state.step and self.branch == state.branch
        return is_of_step and self.phase <= state.phase <= self.until


class Buffers:
    """The persistent buffers of a module, with copies of all at the beginning (`initial`). Large
    ones are only noted if they have changed.

    A buffer may be replaced, so it is looked up by its name each time. Only a digest of its
    contents tells whether it has changed: batch norms and writes through `.data` are not counted by
    torch, and `DistributedDataParallel` writes the same contents again. The counter of an
    `AveragedModel` changes after a rank has noted its own state early, and is the same on all
    ranks: it is shared.
    """

    def __init__(self, entries: Mapping[str, Any], module: nn.Module) -> None:
        owners = {
            id(buffer): (inner, key)
            for inner in module.modules()
            for key, buffer in inner._buffers.items()
            if buffer is not None
        }
        self._owners = {
            name: owners[id(entry)]
            for name, entry in entries.items()
            if not (isinstance(entry, nn.Parameter) or wraps(entry)) and id(entry) in owners
        }
        self.initial = {name: self._present(name).detach().clone() for name in self._owners}
        self._shared = {
            name
            for name, (inner, key) in self._owners.items()
            if isinstance(inner, AveragedModel) and key == "n_averaged"
        }
        self._seen = {name: self._mark(name) for name in self._owners if name not in self._shared}
        self._noted: dict[str, Any] = {}

    def note(self) -> dict[str, Any]:
        """The contents of the buffers, except large ones unchanged since this object's creation."""
        for name, seen in self._seen.items():
            mark = self._mark(name)
            if not mark or mark != seen:
                self._noted[name] = packed(self._present(name))
                self._seen[name] = mark
        return dict(self._noted)

    def shared(self) -> dict[str, torch.Tensor]:
        """The buffers that are the same on all ranks."""
        return {name: self._present(name) for name in self._shared}

    def _present(self, name: str) -> torch.Tensor:
        inner, key = self._owners[name]
        found = inner._buffers[key]
        assert found is not None
        return found

    def _mark(self, name: str) -> str:
        """Changes with the contents; empty for a small buffer."""
        buffer = self._present(name)
        if buffer.nbytes <= _SMALL_BYTES:
            return ""
        return f"{buffer.dtype} {tuple(buffer.shape)} {digest(buffer)}"


MakeMirror = Callable[[SharedMemory, int], Any]
"""Begins to mirror a memory with blocks of this size on another host: returns a `MirrorSender`."""


class Slots:
    """The slots of this process. `mirror` begins to mirror them on another host."""

    def __init__(self, payload_bytes: int, mirror: MakeMirror | None = None) -> None:
        each = max(2 * payload_bytes, _LEAST_BYTES)
        self.memory = SharedMemory(_SLOTS * each)
        self._capacity = self.memory.size_bytes // _SLOTS
        # The slots of the final states that are needed: those of the last step, and of the last
        # phase of the step before; and the slot that was written last.
        self._final: list[int] = []
        self._step = self._last = -1
        self._order = 0  # of the last write, among all
        self._extended: list[tuple[int, int]] = []
        self._mirror = None if mirror is None else mirror(self.memory, self._capacity)

    def close_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.close()

    def write(self, record: Record, state: bytes) -> bool:
        """Writes a state. Returns `False` if it is too large, or if the memory was lost."""
        if not self.memory.intact:
            return False
        # Not `dataclasses.astuple`: its deep copies take longer than all the rest.
        content = pickle.dumps((tuple(vars(record).values()), state))
        if _CONTENT + len(content) > self._capacity:
            return False
        number = next(i for i in range(_SLOTS) if i != self._last and i not in self._final)
        self._order += 1
        at, view = number * self._capacity, self.memory.view
        first = at + _CONTENT
        _HEADER.pack_into(view, at, 0, 0, 0)
        view[at + _UNTIL] = record.until
        view[first : first + len(content)] = content
        _HEADER.pack_into(view, at, self._order, len(content), _checksum(self._order, content))
        if record.final:
            kept = self._final if record.step == self._step else self._final[-1:]
            self._final, self._step = [*kept, number][-4:], record.step
        self._last = number
        if self._mirror is not None:
            self._mirror.wrote(*self._extended, (at, _CONTENT + len(content)))
            self._extended = []
        return True

    def extend(self, until: int) -> None:
        """The last final state that was written also holds for the phases up to `until`."""
        if self.memory.intact and self._final:
            at = self._final[-1] * self._capacity + _UNTIL
            self.memory.view[at] = until
            # Mirrored with the next state: without it, the end of the last phase is repeated.
            self._extended = [(at, 1)]


def read_all(memories: Sequence[SharedMemory]) -> dict[Record, bytes]:
    """The states in several memories: of several of the same, the one that was written last."""
    return dict(reversed([each for memory in memories for each in read(memory)]))


def values_of_states(noted: Mapping[Record, bytes]) -> list[tuple[int, str, int, Any]]:
    """The values of `states` in what ranks have noted, as `equal_states.refusal` takes them."""
    return [
        (record.step, f"{record.branch}/{phase}", record.rank, values)
        for record, own in noted.items()
        if record.final and (values := load_plain(own).get("states"))
        for phase in range(record.phase, record.until + 1)
    ]


def read(memory: SharedMemory) -> list[tuple[Record, bytes]]:
    """The states in the memory of a process, the one that was written last comes first."""
    if not memory.intact:
        return []
    capacity = memory.size_bytes // _SLOTS
    found: dict[int, tuple[Record, bytes]] = {}
    for at in range(0, _SLOTS * capacity, capacity):
        order, size, checksum = _HEADER.unpack_from(memory.view, at)
        if not 0 < size <= capacity - _CONTENT:
            continue
        content = bytes(memory.view[at + _CONTENT : at + _CONTENT + size])
        if _checksum(order, content) == checksum:
            values, state = load_plain(content)
            record = dataclasses.replace(Record(*values), until=memory.view[at + _UNTIL])
            found[order] = record, state
    return [found[order] for order in sorted(found, reverse=True)]


def _checksum(order: int, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content, seed=order)
