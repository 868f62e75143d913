"""The parts of a state dict that this rank saves: tensors, their layout, and pickled values.

A `Structure` is made once for all state dicts of equal structure. A save then only looks the
tensors up and copies them.
"""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch

from outlast.async_checkpoint.plain_values import Unsavable, encode
from outlast.async_checkpoint.snapshot.layout import Layout, lay_out
from outlast.async_checkpoint.state_dict.last_value import Last
from outlast.async_checkpoint.state_dict.sharding import Item, Key
from outlast.async_checkpoint.state_dict.tree import is_leaf, look_up, nodes
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.errors import CheckpointError, CheckpointUnsavable
from outlast.system.shared_memory import SharedMemory

_SIMPLE = (int, float, str, bool, type(None))


def values_file(rank: int) -> str:
    """The file of a rank's values, whose size differs from save to save."""
    return f"__{rank}_values.distcp"


class Structure:
    """The parts of a state dict that this rank saves: `tensors` and `values`, from the `items`
    whose key is in `keys`. `index` says what they are and where, as JSON, for a process that takes
    the snapshot over; `digest` is the hash of that.
    """

    def __init__(self, items: Sequence[Item], keys: Collection[Key], rank: int) -> None:
        mine = set(keys)
        self.items = list(items)
        self.tensors = [i for i in items if i.kind == "tensor" and i.key in mine]
        self.values = [i for i in items if i.kind == "value" and i.key in mine]
        self.layout: Layout = lay_out(self.tensors, rank)
        self.index = self._describe()
        self.digest = checksum(self.index)
        self._leaves: list[int] = []
        self._pickled: dict[str, Last[bytes]] = collections.defaultdict(Last)

    def targets(self, memory: SharedMemory) -> list[torch.Tensor]:
        """Tensors that are views of the memory, one for each of `tensors`."""
        if not self.tensors:
            return []
        whole = torch.frombuffer(memory.view, dtype=torch.uint8)
        return [
            whole[extent.buffer_at : extent.buffer_at + extent.data_bytes]
            .view(getattr(torch, item.dtype))
            .view(item.sizes)
            if extent.data_bytes  # an empty tensor has no aligned offset
            else torch.empty(item.sizes, dtype=getattr(torch, item.dtype))
            for item, extent in zip(self.tensors, self.layout.extents, strict=True)
        ]

    def _describe(self) -> bytes:
        tensors: dict[str, Any] = {}
        for item, extent in zip(self.tensors, self.layout.extents, strict=True):
            entry = tensors.setdefault(
                item.name,
                {"path": item.path, "dtype": item.dtype, "shape": item.shape, "shards": []},
            )
            entry["shards"].append(
                {
                    "offsets": item.offsets,
                    "sizes": item.sizes,
                    "file": extent.file,
                    "at": extent.data_at,
                }
            )
        values = [[item.name, item.path] for item in self.values]
        return json.dumps({"tensors": tensors, "values": values}).encode()

    def number(self, state_dict: Mapping[str, Any]) -> None:
        """Stores the position of each tensor among the leaves of a state dict of this structure."""
        leaves = (path for path, value in nodes(state_dict) if is_leaf(value))
        numbers = {path: number for number, path in enumerate(leaves)}
        self._leaves = [numbers[item.path] for item in self.tensors]

    def sources(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of a state dict, one for each of `tensors`: this rank's part of each.
        `leaves` are those of `signature_and_leaves`.
        """
        return [
            # A plain tensor has the planned shape, which is in the signature.
            leaf
            if type(leaf := leaves[number]) is torch.Tensor
            and not leaf.is_meta
            and not leaf.is_conj()
            and not leaf.is_neg()
            else local_part(leaf, item)
            for item, number in zip(self.tensors, self._leaves, strict=True)
        ]

    def pickle_values(self, state_dict: Mapping[str, Any]) -> tuple[bytes, list[list[int]]]:
        """The values, each serialized by torch, one after another; and the offset and size of each.

        Raises:
            CheckpointUnsavable: if a value could not be loaded again (`plain_values`); names it.
        """
        parts: list[bytes] = []
        places: list[list[int]] = []
        at = 0
        for item in self.values:
            data = self._pickle(item, look_up(state_dict, item.path))
            places.append([at, len(data)])
            parts.append(data)
            at += len(data)
        return b"".join(parts), places

    def _pickle(self, item: Item, value: Any) -> bytes:
        if type(value) in _SIMPLE:
            # By `repr`, because 0.0 == -0.0 and nan != nan.
            return self._pickled[item.name].of(repr(value), lambda: _pickle(item, value))
        return _pickle(item, value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def _pickle(item: Item, value: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(encode(value), file)
    except Unsavable as e:
        raise CheckpointUnsavable(f"{item.name + e.where!r} cannot be saved: {e}") from e
    except Exception as e:
        kind = type(value).__name__
        raise CheckpointUnsavable(f"{item.name!r} ({kind}) cannot be saved: {e}") from e
    return file.getvalue()


def local_part(leaf: Any, item: Item) -> torch.Tensor:
    """This rank's part of a tensor, as described by `item`."""
    if hasattr(leaf, "local_shards"):  # ShardedTensor
        for shard in leaf.local_shards():
            if tuple(shard.metadata.shard_offsets) == item.offsets:
                part = shard.tensor
                break
        else:
            raise CheckpointError(f"{item.name!r} has no shard at {item.offsets} on this rank")
    elif hasattr(leaf, "to_local"):  # DTensor
        part = leaf.to_local()
    else:
        part = leaf
    part = cast(torch.Tensor, part).detach()
    if part.is_meta:
        raise CheckpointUnsavable(f"{item.name!r} is a meta tensor, which has no data")
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    if tuple(part.shape) != item.sizes:
        raise CheckpointError(
            f"{item.name!r} has shape {tuple(part.shape)} on this rank, {item.sizes} was planned"
        )
    return part
