"""What belongs to a save beside the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a rank adds to a save; its calls are made on the thread of the saves.

    Attributes:
        sync: called before this rank reports its part. An error fails the save on all ranks.
        digests: by name, those of values that should be equal on all ranks.
        committed: called once the save is committed: by name of what differs, the first rank that
            differs from rank 0. It must not raise.
    """

    sync: Callable[[], object] = lambda: None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    committed: Callable[[Mapping[str, int]], object] = lambda differing: None


class _Record(msgspec.Struct):
    digests: dict[str, str] = {}


def differing(records: Sequence[bytes]) -> dict[str, int]:
    """What `Beside.committed` is given, from the records of all ranks. What rank 0 does not have is
    not compared: a rank may have states of its own, under a name of its own.
    """
    first, *others = [msgspec.json.decode(each, type=_Record).digests for each in records]
    found: dict[str, int] = {}
    for rank, digests in enumerate(others, 1):
        for name in first if digests != first else ():
            if digests.get(name, first[name]) != first[name]:
                found.setdefault(name, rank)
    return found
