"""The state of a rank after a step: references to its tensors, copies of all that is small.

A point is *noted* after each step, which copies next to nothing. It is *frozen* when the iteration
is over: only then is the nested state built, and split into tensors and everything else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from outlast.elastic.job.live.encoding import dump_header

# A larger tensor outside the model and the optimizer, for example in an average of the weights, is
# not copied after every step: instead, its writes are counted.
_COPIED_BYTES = 64 << 10
_ATOMS = (str, bytes, int, float, complex, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Place:
    """Identifies a state, and the rank that had it. See the package on branches."""

    branch: str
    step: int
    rank: int
    world_size: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a tensor in a frozen state: its number; a DTensor is sent as its local part."""

    number: int
    sharded: bool


class Versions:
    """Which tensors were written to since they were added."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._counts = self._count()

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)
        self._counts.append(_version(tensor))

    def changed(self) -> list[torch.Tensor]:
        """The tensors with a write that torch has counted."""
        now = self._count()
        if now == self._counts:
            return []
        return [t for t, a, b in zip(self._tensors, now, self._counts, strict=True) if a != b]

    def _count(self) -> list[Any]:
        return [_version(tensor) for tensor in self._tensors]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A state that no longer changes.

    Attributes:
        settled: whether the rank's own state had been known before the step was completed, after
            `passes` backward passes.
        skeleton: the nested state, with a `Leaf` in place of each tensor.
        leaves: the tensors; of a DTensor, the local part.
        versions: tells whether a tensor was written to since.
        signature: equal on ranks that hold the same parts of the same model.
    """

    place: Place
    settled: bool
    passes: int
    skeleton: Any
    leaves: Sequence[torch.Tensor]
    versions: Versions
    signature: str

    @property
    def layout(self) -> str:
        """Equal for states whose tensors have the same shapes and types, in the same order."""
        return _hash_of([(t.dtype, tuple(t.shape)) for t in self.leaves])

    def header(self) -> bytes:
        """All but the tensors' contents, for another rank."""
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.leaves]
        return dump_header(self.skeleton, shapes)


def by_value(value: Any, watched: Versions) -> Any:
    """A copy of a nested state; a large tensor is referred to, and added to `watched`."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return held(value, watched)
    if isinstance(value, dict):
        copied = value.copy()
        for key, each in copied.items():
            if type(each) not in _ATOMS:
                copied[key] = by_value(each, watched)
        return copied
    if type(value) is list:
        return [by_value(each, watched) for each in value]
    if type(value) is tuple:
        return tuple(by_value(each, watched) for each in value)
    return copy.deepcopy(value)


def held(tensor: torch.Tensor, watched: Versions) -> torch.Tensor:
    """A copy of a small tensor; a large one itself, which is added to `watched`."""
    if not isinstance(tensor, DTensor) and tensor.nbytes <= _COPIED_BYTES:
        return tensor.detach().clone()
    watched.add(tensor)
    return tensor.detach()


def split(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Replaces the tensors of a nested state by leaves, and appends them to `leaves`."""
    if isinstance(value, torch.Tensor):
        sharded = isinstance(value, DTensor)
        leaves.append(local(value))
        return Leaf(len(leaves) - 1, sharded)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = split(each, leaves)
        return copied
    if type(value) is list:
        return [split(each, leaves) for each in value]
    if type(value) is tuple:
        return tuple(split(each, leaves) for each in value)
    return value


def join(skeleton: Any, leaves: Sequence[torch.Tensor], target: Any) -> Any:
    """The nested state of which `split` has made `skeleton`. The local part of a DTensor is copied
    into the DTensor that `target` has in its place.

    Raises:
        ValueError: if there is none of that shape.
    """
    if isinstance(skeleton, Leaf):
        tensor = leaves[skeleton.number]
        if not skeleton.sharded:
            return tensor
        if not isinstance(target, DTensor) or local(target).shape != tensor.shape:
            raise ValueError("the parts of a sharded tensor differ from those before the fault")
        with torch.no_grad():
            local(target).copy_(tensor)
        return target
    if isinstance(skeleton, dict):
        copied = copy.copy(skeleton)
        inner = target if isinstance(target, dict) else {}
        for key, each in skeleton.items():
            copied[key] = join(each, leaves, inner.get(key))
        return copied
    if type(skeleton) in (list, tuple):
        given = target if type(target) in (list, tuple) else ()
        found = [
            join(each, leaves, given[i] if i < len(given) else None)
            for i, each in enumerate(skeleton)
        ]
        return found if type(skeleton) is list else tuple(found)
    return skeleton


def signature(entries: dict[str, Any]) -> str:
    """Equal for models of which this rank holds the same parts."""
    found: list[Any] = []
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        where: Any = None
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            at = list(mesh.get_coordinate() or [])
            where = [
                (str(placement), mesh.size(dim), at[dim])
                for dim, placement in enumerate(value.placements)
                if not placement.is_replicate()
            ]
        found.append((name, str(value.dtype), tuple(value.shape), where))
    return _hash_of(found)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; of a DTensor, the part of this rank."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def digest(tensor: torch.Tensor) -> str:
    """Of the tensor's contents."""
    content = local(tensor).cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


def _hash_of(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def _version(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):  # torch counts on the one or on the other
        return tensor._version, tensor._local_tensor._version
    return 0 if tensor.is_inference() else tensor._version
