"""The plan of a save: which parts of a state dict a rank holds, and which of them it saves.

The planner of torch.distributed.checkpoint lists the parts of a state dict that a rank holds
(`describe`): whole tensors, shards of DTensors and ShardedTensors, values. A part that several
ranks hold is saved by one of them (`share_out`): a large one by the rank with the least to save so
far, a small one by the lowest rank. This is decided again when a state dict has a new structure.

Ranks exchange JSON, so nothing from another host is unpickled.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.async_checkpoint.state_dict import (
    PLAIN,
    Path,
    check_savable,
    nodes,
    too_deep,
    torch_path,
    unwrapped,
)
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, is_covered, tree_path
from outlast.async_checkpoint.subclasses import wraps
from outlast.errors import CheckpointError, CheckpointUnsavable

Key = tuple[str, tuple[int, ...]]

# A dict of any other class comes back as a dict.
_CLASSES: dict[Any, str] = {OrderedDict: "OrderedDict", Counter: "Counter"}
# Up to this size, the lowest rank saves. Dividing small tensors among the ranks saves no time, and
# some of them differ: the statistics of a batch norm, of which DDP continues with those of rank 0.
_SMALL_BYTES = 64 * 1024
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Item(NamedTuple):
    """One part of a state dict.

    Attributes:
        name: the flat name, as in torch.distributed.checkpoint.
        path: its keys; the index of a list is a tuple, `(i,)`.
        kind: `tensor`, or `value` for anything that is pickled, including sparse tensors; or
            `container` for a dict that is empty, or of another class: all ranks tell of it, and
            none saves it.
        offsets, sizes: of this part in the tensor, which has `shape`.
        dtype: without `torch.`; of a container, that of `Container`.
    """

    name: str
    path: tuple[Any, ...]
    kind: str
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def key(self) -> Key:
        """Identifies it among the parts of all ranks."""
        return self.name, self.offsets

    @property
    def size_bytes(self) -> int:
        if self.kind != "tensor":
            return 0
        return int(math.prod(self.sizes) * getattr(torch, self.dtype).itemsize)


def describe(state_dict: Mapping[str, Any]) -> list[Item]:
    """The parts of `state_dict` that this rank holds, in its order. A `CheckpointUnsavable` for
    keys that are neither text nor numbers, duplicate names, meta tensors, and other tensors that
    cannot be saved.
    """
    planner = DefaultSavePlanner()
    try:
        paths, containers = _paths(state_dict)
        planner.set_up_planner(unwrapped(state_dict), is_coordinator=True)
    except RecursionError:
        raise too_deep(state_dict) from None
    except ValueError as e:
        raise _two_entries(str(e).removeprefix("duplicated flatten key ")) from None
    items, rest = containers, {}
    found: list[tuple[str, Any, Any, Any, torch.dtype]] = []  # offsets, sizes, shape of each tensor
    for name, leaf in planner.state_dict.items():
        if type(leaf) in _TENSORS and _is_strided(leaf):  # most are: torch's planner is slow
            found.append((name, (0,) * leaf.ndim, leaf.shape, leaf.shape, leaf.dtype))
        else:
            rest[name] = leaf
    planner.state_dict = rest
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, item.tensor_data
        if item.type is WriteItemType.BYTE_IO or data is None or not _is_strided(rest[name]):
            items.append(Item(name, paths[planner.mappings[name]], "value"))
            continue
        _check_has_data(name, rest[name])
        found.append((name, data.chunk.offsets, data.chunk.sizes, data.size, data.properties.dtype))
    for name, offsets, sizes, shape, kind in found:
        dtype = str(kind).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise CheckpointUnsavable(
                f"{name!r} is {dtype}, which this version of outlast cannot save"
            )
        path, at, size = paths[planner.mappings[name]], tuple(offsets), tuple(sizes)
        items.append(Item(name, path, "tensor", at, size, tuple(shape), dtype))
    places = {path: place for place, path in enumerate(paths.values())}
    return sorted(items, key=lambda item: places[item.path])


def _check_has_data(name: str, leaf: Any) -> None:
    own = getattr(leaf, "_local_tensor", leaf)
    if hasattr(leaf, "local_shards") or type(own) in _TENSORS:
        return
    if is_traceable_wrapper_subclass(own):
        lacks = own is leaf or wraps(own)  # the part of a DTensor may be a tensor to wait for
    else:
        lacks = own.numel() and not own.is_meta and own.data_ptr() == 0
    if lacks:
        kind = type(own).__name__ if own is leaf else f"DTensor of {type(own).__name__}"
        raise CheckpointUnsavable(
            f"{name!r} is a {kind}, which has no data of its own: save the tensors that it wraps"
        )


def _paths(state_dict: Mapping[str, Any]) -> tuple[dict[Path, Path], list[Item]]:
    """Maps torch's paths, in which every dict key is text, to ours, which keep the types and are in
    order; and the containers.
    """
    found: dict[Path, Path] = {}
    containers = []
    for path, value in nodes(state_dict):
        is_dict = type(value) not in PLAIN and isinstance(value, Mapping)
        kind = _CLASSES.get(type(value), "dict") if is_dict else ""
        if is_dict and path and (not value or kind != "dict"):
            name = ".".join(map(str, torch_path(path)))
            containers.append(Item(name, path, "container", dtype=kind))
        if isinstance(value, torch.Tensor):
            check_savable(path, value)
        for key in value if is_dict else ():
            if not isinstance(key, str | int) or isinstance(key, bool):
                where = "".join(f"[{k[0] if isinstance(k, tuple) else k!r}]" for k in path)
                raise CheckpointUnsavable(
                    f"state_dict{where} has the key {key!r}; keys are text or numbers"
                )
            plain = str.__str__(key) if isinstance(key, str) else int.__repr__(key)
            if str(key) != plain:  # a restore would find neither the one nor the other
                where = ".".join(map(str, torch_path(path)))
                raise CheckpointUnsavable(
                    f"{where!r} has the key {key!r}, whose text {str(key)!r} is not its value "
                    f"{plain!r}: use the value as the key"
                )
        flat = torch_path(path)
        if flat in found:  # one of them may be a dict, which has no entry of its own
            raise _two_entries(".".join(map(str, flat)))
        found[flat] = path
    return found, containers


def _two_entries(name: str) -> CheckpointUnsavable:
    return CheckpointUnsavable(
        f"{name!r} is the name of two entries: rename a key (1 and '1' are the same in a name, and "
        "so are 'a.b' and 'b' in 'a')"
    )


def _is_strided(leaf: Any) -> bool:
    """Whether the data of a tensor is contiguous, at least after a copy."""
    if hasattr(leaf, "local_shards"):  # a ShardedTensor has few attributes of a tensor
        return True
    return leaf.layout is torch.strided and not getattr(leaf, "is_quantized", False)


def share_out(
    plans: Mapping[int, Sequence[Item]], fixed: Mapping[int, Iterable[Key]] | None = None
) -> dict[int, list[Key]]:
    """Divides the parts among the ranks that hold them. Returns the keys that each rank saves, in
    the order of its plan. `fixed` are the keys that ranks save already, by an earlier decision. A
    `CheckpointError` if tensors of one name differ between ranks, or parts lack or overlap.
    """
    fixed = fixed or {}
    owner: dict[Key, int] = {key: rank for rank, keys in fixed.items() for key in keys}
    holders: dict[Key, list[int]] = {}
    parts: dict[Key, Item] = {}
    first: dict[str, tuple[int, Item]] = {}
    for rank, items in plans.items():
        for item in items:
            if item.kind == "container":
                continue
            begun = first.setdefault(item.name, (rank, item))
            other = begun[1]
            if (item.kind, item.shape, item.dtype) != (other.kind, other.shape, other.dtype):
                raise CheckpointError(
                    f"{item.name!r} is {_described(other)} on rank {begun[0]}, but "
                    f"{_described(item)} on rank {rank}: parts that differ between ranks need "
                    "different names"
                )
            holders.setdefault(item.key, []).append(rank)
            parts.setdefault(item.key, item)
    load = dict.fromkeys(plans, 0)
    for key, rank in owner.items():
        load[rank] += parts[key].size_bytes + 1 if key in parts else 0
    for key, ranks in holders.items():
        if owner.get(key) not in ranks:
            small = parts[key].size_bytes <= _SMALL_BYTES
            owner[key] = min(ranks) if small else min(ranks, key=lambda rank: load[rank])
            load[owner[key]] += parts[key].size_bytes + 1
    _check_covered(parts.values())
    return {
        rank: [item.key for item in items if owner.get(item.key) == rank]
        for rank, items in plans.items()
    }


def _check_covered(parts: Iterable[Item]) -> None:
    known: dict[str, list[Item]] = {}
    for item in parts:
        if item.kind == "tensor":
            known.setdefault(item.name, []).append(item)
    for name, items in known.items():
        shape = items[0].shape
        if not is_covered(shape, [(item.offsets, item.sizes) for item in items]):
            volume = sum(math.prod(item.sizes) for item in items)
            raise CheckpointError(
                f"the parts of {name!r} on all ranks have {volume} elements together, but its "
                f"shape {shape} has {math.prod(shape)}, each of which must be in one part"
            )


def _described(item: Item) -> str:
    return f"a tensor {item.shape} of {item.dtype}" if item.kind == "tensor" else "a value"


def encode_items(items: Sequence[Item]) -> bytes:
    """Items as JSON."""
    return json.dumps(items, separators=(",", ":")).encode()


def decode_items(content: bytes) -> list[Item]:
    """The inverse of `encode_items`."""
    return [
        Item(name, tree_path(path), kind, tuple(offsets), tuple(sizes), tuple(shape), dtype)
        for name, path, kind, offsets, sizes, shape, dtype in json.loads(content)
    ]
