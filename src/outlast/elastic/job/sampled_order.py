"""The order in which a sampler has given its indices, as a digest after each batch; and the states
of the generators from which it draws them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from outlast.elastic import random_generators as generators
from outlast.elastic.job.encoding import packed, unpacked

Noted = dict[str, tuple[str, bytes]]
"""The states of generators, by name: the type of their elements, and these."""

OWN = "own"  # the names of generators that the loader was given: own0, own1, ...

NOTE = "order"
"""Its name among what is noted of a pass."""


_OTHER_ORDER = (
    ". It may draw from a generator that the job does not know, such as NumPy's, or shuffle a list "
    "in place. Make its order depend on set_epoch(epoch), or draw it in __iter__ from a "
    "torch.Generator that is an attribute of the sampler"
)


class SampledOrder:
    """The order of one pass over the indices of a loader. A pass that continues draws them again:
    after as many as were done, their digest must be that which was noted.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._digests = array("Q")

    def after(self, batches: int) -> bytes:
        """The digest of the first `batches`; empty if there were fewer."""
        if not 0 < batches <= len(self._digests):
            return b""
        return self._digests[batches - 1].to_bytes(8, "little")

    def followed(
        self, source: Iterable[Any], noted: tuple[str, bytes] | None, change: str = ""
    ) -> Iterator[Any]:
        """The indices of `source`. A `ValueError` if those of the first batches are others than was
        `noted`: their number, and the digest. `change` says in what the loader has changed.
        """
        count, digest = (0, b"") if noted is None else (int(noted[0]), noted[1])
        for indices in source:
            self._hash.update(_content(indices))
            self._digests.append(self._hash.intdigest())
            if len(self._digests) == count and self.after(count) != digest:
                raise ValueError(
                    f"the sampler gives another order than before: its first {count} batches are "
                    "not those that are done, so samples would be repeated and others skipped"
                    + (change or _OTHER_ORDER)
                )
            yield indices


def _content(indices: Any) -> bytes:
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):  # a single index, or indices of a type of the program
        return repr(indices).encode()


def note(own: Sequence[torch.Generator]) -> Noted:
    """The present states of the global generators, and of a loader's own."""
    noted = {name: packed(state) for name, state in generators.capture().items()}
    return {name: (dtype, content) for name, (dtype, _, content) in noted.items()} | states_of(own)


def states_of(own: Sequence[torch.Generator]) -> Noted:
    """Those of a loader's own generators, by their numbers."""
    noted = {f"{OWN}{i}": packed(each.get_state()) for i, each in enumerate(own)}
    return {name: (dtype, content) for name, (dtype, _, content) in noted.items()}


def set_noted(noted: Mapping[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Sets the generators to noted states, or to captured ones."""
    for name, value in noted.items():
        if name == NOTE:
            continue
        state = value if isinstance(value, torch.Tensor) else unpacked((value[0], [-1], value[1]))
        if not name.startswith(OWN):
            generators.setter(name, state)()
        elif int(name.removeprefix(OWN)) < len(own):
            own[int(name.removeprefix(OWN))].set_state(state)
