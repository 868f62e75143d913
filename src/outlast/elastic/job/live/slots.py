"""The last states of one rank in shared memory, which survives a kill of the process.

The memory has four slots, for the last two completed steps, the coming one, and the one that is
being written. A slot that holds one of the first three is never written to, so a kill in the middle
of a write costs nothing that was there before. A checksum tells a slot that was written in part.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct

import xxhash

from outlast.elastic.job.live.encoding import load_plain
from outlast.system.shared_memory import SharedMemory

_SLOTS = 4
# The order of writing, the sizes of the description and of the state, the checksum.
_HEADER = struct.Struct("<QQQQ")
_LEAST_BYTES = 64 << 10


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
        description = pickle.dumps(tuple(vars(record).values()))
        end = _HEADER.size + len(description) + len(state)
        if end > self._capacity:
            return False
        number = self._free()
        self._held[number] = None
        self._order += 1
        at = number * self._capacity
        view = self.memory.view
        _HEADER.pack_into(view, at, 0, 0, 0, 0)
        content = description + state
        view[at + _HEADER.size : at + end] = content
        sizes = self._order, len(description), len(state)
        _HEADER.pack_into(view, at, *sizes, _checksum(*sizes, content))
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
        order, size, state_size, checksum = _HEADER.unpack_from(memory.view, at)
        first = at + _HEADER.size
        if not size or size + state_size > capacity - _HEADER.size:
            continue
        content = bytes(memory.view[first : first + size + state_size])
        if _checksum(order, size, state_size, content) == checksum:
            record = Record(*load_plain(content[:size]))
            found.append((order, record, content[size:]))
    found.sort(key=lambda each: each[0], reverse=True)
    return [(record, state) for _, record, state in found]


def _checksum(order: int, size: int, state_size: int, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content, seed=(order * 1_000_003 + size * 31 + state_size))
