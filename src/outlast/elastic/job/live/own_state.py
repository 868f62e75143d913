"""The state of one rank alone after a step: noted by value, and kept over a kill of the process.

It consists of the buffers of the model, such as the statistics of a batch norm, which change during
the forward pass and may differ between replicas, and of what each `Part` calls its own.

The last states are in shared memory. It has four slots, for the last two completed steps, the
coming one, and the one that is being written. A slot that holds one of the first three is never
written to, so a kill in the middle of a write costs nothing that was there before. A checksum tells
a slot that was written in part.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim.swa_utils import AveragedModel

from outlast.elastic.job.encoding import digest, load_plain, packed
from outlast.system.shared_memory import SharedMemory

_SLOTS = 4
_HEADER = struct.Struct("<QQQ")  # the order of writing, the size of the content, its checksum
_LEAST_BYTES = 64 << 10
_SMALL_BYTES = 64 << 10  # of a buffer that is noted every time


@dataclasses.dataclass(frozen=True)
class Record:
    """Describes the state of one rank after `step` on `branch`.

    Attributes:
        final: whether the step was completed; otherwise the state was noted during the step, after
            `passes` backward passes.
        rank, world_size: the place of the process at that time.
    """

    branch: str
    step: int
    final: bool
    rank: int
    world_size: int
    passes: int = 0


class Buffers:
    """The persistent buffers of a module. Large ones are only noted if they have changed.

    A buffer may be written to or replaced, so it is looked up by its name each time. Only a digest
    of its contents tells whether it has changed: the kernel of a batch norm and programs that write
    through `.data` (averages in a codebook) do so uncounted by torch, and `DistributedDataParallel`
    writes the same contents again.

    The counter of an `AveragedModel` changes after a rank has noted its own state early, and is the
    same on all ranks: it is shared.

    Attributes:
        initial: copies of all buffers, made when this object was created.
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
            if not isinstance(entry, nn.Parameter) and id(entry) in owners
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
        """The contents of the buffers, except large ones that have not changed since this object
        was created.
        """
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


class Slots:
    """The slots of this process."""

    def __init__(self, payload_bytes: int) -> None:
        each = max(2 * payload_bytes, _LEAST_BYTES)
        self.memory = SharedMemory(_SLOTS * each)
        self._capacity = self.memory.size_bytes // _SLOTS
        self._held: list[tuple[int, Record] | None] = [None] * _SLOTS
        self._order = 0

    def write(self, record: Record, state: bytes) -> bool:
        """Writes a state. Returns `False` if it is too large, or if the memory was lost."""
        if not self.memory.intact:
            return False
        # Not `dataclasses.astuple`: its deep copies take longer than all the rest.
        content = pickle.dumps((tuple(vars(record).values()), state))
        if _HEADER.size + len(content) > self._capacity:
            return False
        number = self._free()
        self._held[number] = None
        self._order += 1
        at, view = number * self._capacity, self.memory.view
        first = at + _HEADER.size
        _HEADER.pack_into(view, at, 0, 0, 0)
        view[first : first + len(content)] = content
        _HEADER.pack_into(view, at, self._order, len(content), _checksum(self._order, content))
        self._held[number] = self._order, record
        return True

    def _free(self) -> int:
        """A slot that holds none of the states that are needed: the last two that are final, and
        the last one if it is not.
        """
        present = sorted((each for each in self._held if each is not None), key=lambda e: e[0])
        final = [order for order, record in present if record.final][-2:]
        needed = {*final, present[-1][0]} if present else set()
        return next(i for i, each in enumerate(self._held) if not each or each[0] not in needed)


def read(memory: SharedMemory) -> list[tuple[Record, bytes]]:
    """The states in the memory of a process, the one that was written last comes first."""
    if not memory.intact:
        return []
    capacity = memory.size_bytes // _SLOTS
    found: list[tuple[int, Record, bytes]] = []
    for at in range(0, _SLOTS * capacity, capacity):
        order, size, checksum = _HEADER.unpack_from(memory.view, at)
        if not 0 < size <= capacity - _HEADER.size:
            continue
        content = bytes(memory.view[at + _HEADER.size : at + _HEADER.size + size])
        if _checksum(order, content) == checksum:
            record, state = load_plain(content)
            found.append((order, Record(*record), state))
    found.sort(key=lambda each: each[0], reverse=True)
    return [(record, state) for _, record, state in found]


def _checksum(order: int, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content, seed=order)
