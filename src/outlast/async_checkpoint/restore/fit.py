"""Compares a state dict with the content of a checkpoint: what fits, and what differs.

An index describes what a checkpoint holds: values, and tensors as parts with offsets in the whole.
The parts that this rank loads are as in torch.distributed.checkpoint (`sharding.describe`).

A state dict in which some tensors of a sharded model are DTensors and others are whole is refused.
The optimizer of a sharded model (FSDP2) has no state before its first step, so its `state_dict()`
has an empty dict, which a restore would fill with whole tensors. torch loads them next to
parameters that are DTensors, and the next step fails: after every restart again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.state_dict.tree import look_up, nodes
from outlast.async_checkpoint.storage.entries import TensorEntry, ValueEntry
from outlast.errors import CheckpointMismatch

_SHOWN = 10  # of each kind of difference


@dataclasses.dataclass(frozen=True)
class Index:
    """What a checkpoint, or a part of it, holds."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a checkpoint fits the state dict of this rank: the items to load, and the names that this
    rank's state dict lacks; another rank's may have them.
    """

    items: list[Item]
    unexpected: list[str]


def fill_empty(
    state_dict: dict[str, Any],
    index: Index,
    check_sizes: Callable[[Iterable[str]], None] = lambda files: None,
) -> None:
    """Fills every empty dict of `state_dict` with what the checkpoint has under it: an optimizer
    that has not stepped yet has no state to load into. `check_sizes` is called with the names of
    the files that hold it, before memory is allocated.
    """
    empty = {path for path, value in nodes(state_dict) if isinstance(value, dict) and not value}
    if not empty:
        return
    entries: list[TensorEntry | ValueEntry] = [*index.tensors.values(), *index.values.values()]
    paths = [tuple(tuple(k) if isinstance(k, list) else k for k in e.path) for e in entries]
    lacking = [
        (path, entry)
        for path, entry in zip(paths, entries, strict=True)
        if any(path[:length] in empty for length in range(len(path)))
    ]
    tensors = [entry for _, entry in lacking if isinstance(entry, TensorEntry)]
    check_sizes({shard.file for tensor in tensors for shard in tensor.shards})
    for path, entry in lacking:
        blank: torch.Tensor | None = None
        if isinstance(entry, TensorEntry):
            blank = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        put(state_dict, path, blank)


def empty_dicts(value: Any) -> list[dict[Any, Any]]:
    """The dicts that `fill_empty` would fill."""
    return [found for _, found in nodes(value) if isinstance(found, dict) and not found]


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets the value at `path`; creates the dicts and lists on the way."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        place = key[0] if isinstance(key, tuple) else key
        if isinstance(root, list):
            root.extend([None] * (place + 1 - len(root)))
        if following is None:
            root[place] = value
            return
        present = root[place] if isinstance(root, list) else root.get(place)
        if present is None:
            present = [] if isinstance(following, tuple) else {}
            root[place] = present
        root = present


def fit(
    items: Sequence[Item],
    index: Index,
    where: str,
    strict: bool,
    optional: tuple[str, ...] = (),
) -> Fit:
    """Compares the parts of a state dict with a checkpoint. Names that only one side has are an
    error if `strict`, except those that begin with an `optional` prefix.

    Raises:
        CheckpointMismatch: names the keys, shapes and dtypes that differ.
    """
    names = {item.name for item in items}
    saved = {*index.tensors, *index.values}
    differences: list[str] = []
    if strict:
        differences += _few("only in the state dict", _without(names - saved, optional))
    wrong = []
    for item in items:
        entry = index.tensors.get(item.name)
        if item.kind == "tensor" and entry is not None:
            if tuple(entry.shape) != item.shape:
                wrong.append(
                    f"{item.name!r} has shape {item.shape}, {tuple(entry.shape)} was saved"
                )
            elif entry.dtype != item.dtype:
                wrong.append(f"{item.name!r} is {item.dtype}, {entry.dtype} was saved")
        elif item.kind == "tensor" and item.name in index.values:
            wrong.append(f"{item.name!r} is a tensor, a value was saved")
        elif item.kind == "value" and entry is not None:
            wrong.append(f"{item.name!r} is a value, a tensor was saved")
    differences += _few("different", wrong)
    if differences:
        raise _mismatch(where, differences, only_names=not wrong)
    loaded = [item for item in items if item.name in saved]
    return Fit(loaded, _without(saved - names, optional))


def _without(names: set[str], optional: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if not name.startswith(optional))


def left_over(names: Sequence[str], where: str) -> CheckpointMismatch:
    """The error for names that no rank's state dict has."""
    return _mismatch(where, _few("only in the checkpoint", names), only_names=True)


def _mismatch(where: str, differences: Sequence[str], only_names: bool) -> CheckpointMismatch:
    advice = "Build the model and the optimizer as they were saved, or use another folder"
    if only_names:
        advice += "; strict=False of Checkpointer.restore ignores names that only one side has"
    return CheckpointMismatch(
        f"{where} does not fit the state dict: {'; '.join(differences)}. {advice}"
    )


def _few(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]


def check_mixture(
    state_dict: Mapping[str, Any],
    items: Sequence[Item],
    filled: Iterable[dict[Any, Any]],
    index: Index,
    where: str,
) -> None:
    """Checks the tensors of a state dict that has DTensors. `filled` are the dicts that were empty.

    Raises:
        CheckpointMismatch: if a tensor that was saved in parts is whole here, or if a dict was
            filled with whole tensors of the shape of a DTensor, such as an optimizer's moments;
            names the fix.
    """
    shapes = {tuple(leaf.shape) for _, leaf in nodes(state_dict) if isinstance(leaf, DTensor)}
    if not shapes:
        return
    added = {id(leaf) for each in filled for _, leaf in nodes(each)}
    whole = []
    for item in items:
        entry = index.tensors.get(item.name)
        leaf = look_up(state_dict, item.path)
        if entry is None or not item.shape or not _is_plain(leaf):
            continue
        if len(entry.shards) > 1 or (id(leaf) in added and item.shape in shapes):
            whole.append(item.name)
    if whole:
        more = f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else ""
        names = ", ".join(map(repr, whole[:_SHOWN]))
        raise CheckpointMismatch(
            f"{where} cannot be restored into a mixture of DTensors and whole tensors: {names}"
            f"{more} would be whole next to DTensors, which an optimizer cannot step. Build the "
            "state dict with get_state_dict(model, optimizer) of torch.distributed.checkpoint."
            "state_dict, which creates the optimizer's state as DTensors, and load it with "
            "set_state_dict; or use outlast.Job"
        )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
