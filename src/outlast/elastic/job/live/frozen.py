"""A rank's state after a step, kept from the end of an iteration until the next restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from outlast.async_checkpoint.state_dict import replaced
from outlast.async_checkpoint.subclasses import SUBCLASS, inner, wraps
from outlast.elastic.job.encoding import dump_header, load_state
from outlast.elastic.job.live.own_state import Record, State
from outlast.elastic.job.live.writes import Marks, Snapshot
from outlast.elastic.job.parts import Saver
from outlast.elastic.tensors import Versions, local, shard_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a tensor in a frozen state: its number; a DTensor is sent as its local part."""

    number: int
    sharded: bool


@dataclasses.dataclass(frozen=True)
class Held:
    """Which state the tensors of a rank hold."""

    record: Record  # identifies it, and the rank that had it
    settled: bool  # the rank's own state had been known before the step was completed,
    passes: int  # after so many backward passes
    signature: str  # equal on ranks that hold the same parts of the same model
    layout: str  # equal if the tensors have the same shapes and types, in the same order
    stands_for: Sequence[int] = ()  # the ranks with the same tensors, if others have others
    resizable: bool = True  # whether one can continue without the own parts of some ranks
    place: str = ""  # in its epochs, in words: equal on ranks that make the same steps


@dataclasses.dataclass(frozen=True)
class Point:
    """A phase of the last completed step: `shared` is the small state that is the same on all
    ranks, `own` that of this rank; `marks` find later writes to the tensors of the model and the
    optimizer; `gradients` are those that it lacks.
    """

    record: Record
    settled: bool
    passes: int
    shared: Snapshot
    own: dict[str, Any]
    marks: Marks
    gradients: dict[int, torch.Tensor]


class Frozen:
    """A state that no longer changes; `held` describes it. `skeleton` is the nested state, with a
    `Leaf` in place of each tensor; `leaves` are the tensors, of a DTensor the local part; `own` is
    the state that belongs to the rank alone. `savers`: how a checkpoint is made of it, by the names
    of the parts. `versions` tells whether a tensor was written to since.
    """

    def __init__(
        self,
        state: Any,
        point: Point,
        signature: str,
        savers: dict[str, Saver],
        alike: Sequence[int] = (),
        *,
        resizable: bool,
        place: str,
    ) -> None:
        self.leaves: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._wrapped: list[torch.Tensor] = []
        self.own, self.savers = point.own, savers
        self.skeleton = replaced(state, torch.Tensor, self._leaf)
        self.versions = Versions([*self.leaves, *self._wrapped])
        layout = _hash_of([(t.dtype, tuple(t.shape)) for t in self.leaves])
        self.held = Held(
            point.record,
            point.settled,
            point.passes,
            signature,
            layout,
            alike,
            resizable,
            place,
        )

    @classmethod
    def received(cls, held: Held, header: bytes, leaves: list[torch.Tensor]) -> Frozen:
        """As another process has it. No checkpoint can be made of it."""
        frozen = cls.__new__(cls)
        frozen.held, frozen.leaves, frozen.savers = held, leaves, {}
        frozen.skeleton, frozen.own = load_state(header, [Leaf])
        frozen.versions = Versions(leaves)
        return frozen

    def header(self) -> bytes:
        """All but the tensors' contents, for another rank."""
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.leaves]
        return dump_header((self.skeleton, self.own), shapes)

    def state(self) -> dict[str, Any]:
        return dict(replaced(self.skeleton, Leaf, lambda each: self._tensors[each.number]))

    @property
    def for_any_size(self) -> bool:
        """Whether another number of ranks can continue from it."""
        return self.held.resizable and not any(isinstance(t, DTensor) for t in self._tensors)

    def _leaf(self, tensor: torch.Tensor) -> Any:
        if wraps(tensor):
            self._wrapped.append(tensor)
            return {n: t if n == SUBCLASS else self._leaf(t) for n, t in inner(tensor).items()}
        self._tensors.append(tensor)
        self.leaves.append(local(tensor))
        return Leaf(len(self.leaves) - 1, isinstance(tensor, DTensor))


def of_state(state: State, frozen: Iterable[Frozen]) -> Frozen | None:
    """The one of these that holds a state."""
    return next((each for each in frozen if each.held.record.has(state)), None)


def join(skeleton: Any, leaves: Sequence[torch.Tensor], target: Callable[[], Any]) -> Any:
    """The nested state of which a `Frozen` has made `skeleton`. The local part of a DTensor is
    copied into the DTensor in its place in `target()`: a `ValueError` if it has another shape.
    """
    sharded: list[Leaf] = []

    def content_of(leaf: Leaf) -> torch.Tensor:
        if leaf.sharded:
            sharded.append(leaf)
        return leaves[leaf.number]

    state = replaced(skeleton, Leaf, content_of)
    if not sharded:
        return state
    present = dict(tree_flatten_with_path(target())[0])

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
    tensors = {name: each for name, each in entries.items() if isinstance(each, torch.Tensor)}
    return _hash_of([(n, str(t.dtype), tuple(t.shape), shard_of(t)) for n, t in tensors.items()])


def _hash_of(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
