"""The plan of a save: which parts of a state dict a rank holds, and which of them it saves.

The planner of torch.distributed.checkpoint lists the parts of a state dict that a rank holds
(`describe`): whole tensors, shards of DTensors and ShardedTensors, values. A part that several
ranks hold is saved by one of them (`share_out`): a large one by the rank with the least to save so
far, a small one by the lowest rank. This is decided again when a state dict has a new structure.

Ranks exchange JSON, so nothing from another host is unpickled.
"""

from __future__ import annotations

import itertools
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
    inner_of,
    is_leaf,
    too_deep,
    torch_path,
)
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, is_covered, to_json, tree_path
from outlast.async_checkpoint.subclasses import wraps
from outlast.errors import CheckpointError, CheckpointUnsavable

Key = tuple[str, tuple[int, ...]]
Plan = Sequence[Sequence["Item"]]
"""The parts of one rank. Replicas differ in a few of the keys at the top: what is under each is one
object for all ranks that have it, which is walked once.
"""

# A dict of any other class comes back as a dict.
_CLASSES: dict[Any, str] = {OrderedDict: "OrderedDict", Counter: "Counter"}
# Up to this size, the lowest rank saves. Dividing small tensors among the ranks saves no time, and
# some of them differ: the statistics of a batch norm, of which DDP continues with those of rank 0.
_SMALL_BYTES = 64 * 1024
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}


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
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


def describe(state_dict: Mapping[str, Any]) -> list[Item]:
    """The parts of `state_dict` that this rank holds, in its order. A `CheckpointUnsavable` for
    keys that are neither text nor numbers, duplicate names, meta tensors, and other tensors that
    cannot be saved.
    """
    items: list[Item] = []
    rest: dict[str, Any] = {}  # what torch's planner describes, by its name
    try:
        _add(state_dict, (), "", items, rest)
    except RecursionError:
        raise too_deep(state_dict) from None
    names = [item.name for item in items if item.kind != "container"]
    if len(set(names)) < len(names):
        raise _two_entries(Counter(names).most_common(1)[0][0])
    planner = DefaultSavePlanner()
    planner.set_up_planner(rest, is_coordinator=True)
    planned: dict[str, list[Item]] = {}
    paths = {item.name: item.path for item in items if not item.kind}
    for item in planner.create_local_plan().items if rest else ():
        name, data = item.index.fqn, item.tensor_data
        leaf = planner.state_dict[name]
        if item.type is WriteItemType.BYTE_IO or data is None or not _is_strided(leaf):
            found = Item(name, paths[name], "value")
        else:
            _check_has_data(name, leaf)
            place = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
            found = Item(name, paths[name], "tensor", *place, _dtype(name, data.properties.dtype))
        planned.setdefault(name, []).append(found)
    if not rest:
        return items
    return [e for item in items for e in ([item] if item.kind else planned.get(item.name, ()))]


def _add(value: Any, path: Path, before: str, items: list[Item], rest: dict[str, Any]) -> None:
    """Adds what is in a dict, in a list, or in a tensor that wraps others. torch's planner is slow:
    it gets the few leaves that are neither plain tensors nor simple values.
    """
    is_list = isinstance(value, list)
    if isinstance(value, Mapping):
        _check_keys(path, value)
    for key, each in inner_of(value):
        at = (*path, (key,) if is_list else key)
        name, kind = before + str(key), type(each)
        if kind in _TENSORS and each.dtype in _DTYPES and each.layout is torch.strided:
            if each.is_meta or each.is_nested:
                check_savable(at, each)
            sizes = tuple(each.shape)
            offsets = (0,) * len(sizes)
            items.append(Item(name, at, "tensor", offsets, sizes, sizes, _DTYPES[each.dtype]))
            continue
        if kind is dict and each:
            _add(each, at, f"{name}.", items, rest)
            continue
        if isinstance(each, torch.Tensor):
            check_savable(at, each)
        if kind in PLAIN and kind not in _TENSORS:
            items.append(Item(name, at, "value"))
        elif is_leaf(each) or (isinstance(each, list) and _is_one_value(each)):
            items.append(Item(name, at, ""))
            rest[name] = each
        else:
            of_dict = _CLASSES.get(kind, "dict") if isinstance(each, Mapping) else ""
            if of_dict and (not each or of_dict != "dict"):
                items.append(Item(name, at, "container", dtype=of_dict))
            _add(each, at, f"{name}.", items, rest)


def _is_one_value(value: list[Any]) -> bool:
    """Whether torch saves a list as one value: it has no tensor and no dict, at any depth."""
    return not any(
        isinstance(each, torch.Tensor | Mapping)
        or (isinstance(each, list) and not _is_one_value(each))
        for each in value
    )


def _dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointUnsavable(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, which this version of outlast "
            "cannot save"
        )
    return _DTYPES[dtype]


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


def _check_keys(path: Path, found: Mapping[Any, Any]) -> None:
    if set(map(type, found)) <= {str}:
        return
    where = ".".join(map(str, torch_path(path)))
    texts: set[str] = set()
    for key in found:
        if not isinstance(key, str | int) or isinstance(key, bool):
            place = "".join(f"[{k[0] if isinstance(k, tuple) else k!r}]" for k in path)
            raise CheckpointUnsavable(
                f"state_dict{place} has the key {key!r}; keys are text or numbers"
            )
        plain = str.__str__(key) if isinstance(key, str) else int.__repr__(key)
        if str(key) != plain:  # a restore would find neither the one nor the other
            raise CheckpointUnsavable(
                f"{where!r} has the key {key!r}, whose text {str(key)!r} is not its value "
                f"{plain!r}: use the value as the key"
            )
        if plain in texts:  # one of them may be a dict, which has no entry of its own
            raise _two_entries(".".join(map(str, torch_path((*path, key)))))
        texts.add(plain)


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
    plans: Mapping[int, Plan], fixed: Mapping[int, Iterable[Key]] | None = None
) -> dict[int, list[Key]]:
    """Divides the parts among the ranks that hold them. Returns the keys that each rank saves.
    `fixed` are the keys that ranks save already, by an earlier decision. A `CheckpointError` if
    tensors of one name differ between ranks, or parts lack or overlap.
    """
    fixed = fixed or {}
    owner: dict[Key, int] = {key: rank for rank, keys in fixed.items() for key in keys}
    held: dict[Key, tuple[Item, Sequence[int]]] = {}  # each part, and the ranks that have it
    first: dict[str, tuple[Item, Sequence[int]]] = {}
    groups: dict[int, tuple[Sequence[Item], list[int]]] = {}
    for rank, plan in plans.items():
        for items in plan:
            groups.setdefault(id(items), (items, []))[1].append(rank)
    for items, ranks in groups.values():
        for item in items:
            name, _, kind, offsets, _, shape, dtype = item
            if kind == "container":
                continue
            part = item, ranks
            if (before := first.setdefault(name, part)) is part:
                held[name, offsets] = part
                continue
            other, begun = before
            if (kind, shape, dtype) != (other.kind, other.shape, other.dtype):
                raise CheckpointError(
                    f"{name!r} is {_described(other)} on rank {begun[0]}, but "
                    f"{_described(item)} on rank {ranks[0]}: parts that differ between ranks need "
                    "different names"
                )
            known, holding = held.setdefault(item.key, part)
            if holding is not ranks:
                held[item.key] = known, sorted((*holding, *ranks))
    load = dict.fromkeys(plans, 0)
    for key, rank in owner.items():
        load[rank] += held[key][0].size_bytes + 1 if key in held else 0
    for key, (item, holding) in held.items():
        if owner.get(key) not in holding:
            small = (size_bytes := item.size_bytes) <= _SMALL_BYTES
            owner[key] = min(holding) if small else min(holding, key=lambda rank: load[rank])
            load[owner[key]] += size_bytes + 1
    _check_covered([item for item, _ in held.values()])
    shares: dict[int, list[Key]] = {rank: [] for rank in plans}
    for key in held:
        shares[owner[key]].append(key)
    return shares


def _check_covered(parts: Sequence[Item]) -> None:
    # Other tensors are one part each: equal offsets are one key.
    cut = {name: s for name, _, _, at, sizes, s, _ in parts if sizes != s or any(at)}
    of_name: dict[str, list[Item]] = {name: [] for name in cut}
    for item in parts if cut else ():
        if item.name in cut:
            of_name[item.name].append(item)
    for name, items in of_name.items():
        shape = cut[name]
        if not is_covered(shape, [(item.offsets, item.sizes) for item in items]):
            volume = sum(math.prod(item.sizes) for item in items)
            raise CheckpointError(
                f"the parts of {name!r} on all ranks have {volume} elements together, but its "
                f"shape {shape} has {math.prod(shape)}, each of which must be in one part"
            )


def _described(item: Item) -> str:
    return f"a tensor {item.shape} of {item.dtype}" if item.kind == "tensor" else "a value"


def encode_plan(items: Sequence[Item]) -> dict[bytes, list[Item]]:
    """The items under each key at the top, by their JSON, in which there is no new line."""
    by_key = (list(each) for _, each in itertools.groupby(items, lambda item: item.path[0]))
    return {to_json(each): each for each in by_key} or {b"[]": []}


def decode_items(content: bytes) -> list[Item]:
    """Items from their JSON."""
    return [
        Item(name, tree_path(path), kind, tuple(offsets), tuple(sizes), tuple(shape), dtype)
        for name, path, kind, offsets, sizes, shape, dtype in json.loads(content)
    ]
