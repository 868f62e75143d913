"""A rank's state after a step, kept from the end of an iteration until the next restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_map_with_path

from outlast.elastic.job.encoding import dump_header, local
from outlast.elastic.job.live.own_state import Record
from outlast.elastic.job.live.writes import Versions


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a tensor in a frozen state: its number; a DTensor is sent as its local part."""

    number: int
    sharded: bool


@dataclasses.dataclass(frozen=True)
class Held:
    """Which state the tensors of a rank hold.

    Attributes:
        record: identifies it, and the rank that had it.
        settled: whether the rank's own state had been known before the step was completed, after
            `passes` backward passes.
        signature: equal on ranks that hold the same parts of the same model.
        layout: equal for states whose tensors have the same shapes and types, in the same order.
    """

    record: Record
    settled: bool
    passes: int
    signature: str
    layout: str


class Frozen:
    """A state that no longer changes.

    Attributes:
        held: describes it.
        skeleton: the nested state, with a `Leaf` in place of each tensor.
        own: the state that belongs to the rank alone.
        leaves: the tensors; of a DTensor, the local part.
        versions: tells whether a tensor was written to since.
    """

    def __init__(
        self,
        state: Any,
        own: dict[str, Any],
        record: Record,
        settled: bool,
        passes: int,
        signature: str,
    ) -> None:
        self.leaves: list[torch.Tensor] = []
        self.own = own
        self.skeleton = tree_map_only(torch.Tensor, self._leaf, state)
        self.versions = Versions(self.leaves)
        layout = _hash_of([(t.dtype, tuple(t.shape)) for t in self.leaves])
        self.held = Held(record, settled, passes, signature, layout)

    def header(self) -> bytes:
        """All but the tensors' contents, for another rank."""
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.leaves]
        return dump_header((self.skeleton, self.own), shapes)

    def _leaf(self, tensor: torch.Tensor) -> Leaf:
        self.leaves.append(local(tensor))
        return Leaf(len(self.leaves) - 1, isinstance(tensor, DTensor))


def join(skeleton: Any, leaves: Sequence[torch.Tensor], target: Any) -> Any:
    """The nested state of which a `Frozen` has made `skeleton`. The local part of a DTensor is
    copied into the DTensor that `target` has in its place: a `ValueError` if it has another shape.
    """
    present = dict(tree_flatten_with_path(target)[0])

    def tensor(path: Any, value: Any) -> Any:
        if not isinstance(value, Leaf):
            return value
        content, into = leaves[value.number], present.get(path)
        if not value.sharded:
            return content
        if not isinstance(into, DTensor) or local(into).shape != content.shape:
            raise ValueError("the parts of a sharded tensor differ from those before the fault")
        with torch.no_grad():
            local(into).copy_(content)
        return into

    return tree_map_with_path(tensor, skeleton)


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


def _hash_of(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
