"""Compares a state dict with a checkpoint, and fills it up: what fits, and what differs.

A state dict in which some tensors of a sharded model are DTensors and others are whole is refused.
The optimizer of a sharded model (FSDP2) has no state before its first step, so its `state_dict()`
has an empty dict, which a restore would fill with whole tensors. torch loads them next to
parameters that are DTensors, and the next step fails: after every restart again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.restore.verified_read import Source
from outlast.async_checkpoint.snapshot.plan import Item
from outlast.async_checkpoint.state_dict import ANY_SIZE, look_up, nodes, of_any_size
from outlast.async_checkpoint.storage.entries import Container, Contents, TensorEntry, ValueEntry
from outlast.async_checkpoint.subclasses import SUBCLASS, wraps
from outlast.errors import CheckpointMismatch
from outlast.system.units import listed

_SHOWN = 10  # of each kind of difference
_SUBCLASS = f".{SUBCLASS}"
EXTRA = "_extra_state"  # torch's suffix of the names of extra states


@dataclasses.dataclass(frozen=True)
class Content:
    """What a candidate holds: all of it, and the sources of what this rank reads."""

    whole: Contents
    sources: Sequence[Source]

    @property
    def where(self) -> str:
        return self.sources[0].where


def fill_empty(
    state_dict: dict[str, Any],
    contents: Contents,
    check_sizes: Callable[[Iterable[str]], None] = lambda files: None,
) -> None:
    """Fills every empty dict and list of `state_dict` with what the checkpoint has under it: an
    optimizer that has not stepped yet has no state to load into. The extra states of modules are
    replaced, whatever they are now. `check_sizes` is called with the names of the files that hold
    it, before memory is allocated.
    """
    blank_extra_states(state_dict, contents)
    empty = {path for path, value in nodes(state_dict) if _is_empty(value)}
    if not empty:
        return
    lacking = [
        (path, entry)
        for path, entry in contents.in_order
        if any(path[:length] in empty for length in range(len(path)))
    ]
    tensors = [entry for _, entry in lacking if isinstance(entry, TensorEntry)]
    check_sizes({shard.file for tensor in tensors for shard in tensor.shards})
    for path, entry in lacking:
        if not isinstance(entry, Container) or not _has(state_dict, path):
            put(state_dict, path, _blank(entry))


def _blank(entry: Container | TensorEntry | ValueEntry) -> Any:
    """What is to be filled with what was saved."""
    if isinstance(entry, Container):
        return {"OrderedDict": OrderedDict, "Counter": Counter, "dict": dict}[entry.kind]()
    if isinstance(entry, TensorEntry):
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return None


def _has(value: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)  # a defaultdict would make the value
        elif isinstance(value, list) and isinstance(key, tuple):
            value = value[key[0]] if key[0] < len(value) else None
        else:
            return value is not None
    return value is not None


def empty_in(value: Any) -> list[Any]:
    """The dicts and lists that `fill_empty` would fill."""
    return [found for _, found in nodes(value) if _is_empty(found)]


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list) and not value


def blank_extra_states(state_dict: dict[str, Any], contents: Contents) -> None:
    """Makes each extra state one into which the saved one fits: the size, the keys and the type of
    what `get_extra_state` returns may change in training. So may the size of some tensors.
    """
    shapes = {
        path: tuple(value.shape)
        for path, value in nodes(state_dict)
        if isinstance(value, torch.Tensor) and hasattr(value, ANY_SIZE)
    }
    for path, each in contents.in_order if shapes else ():
        if path in shapes and isinstance(each, TensorEntry) and shapes[path] != tuple(each.shape):
            # Of any size again: another candidate may have another one.
            put(state_dict, path, of_any_size(_blank(each)))
    if not [name for name in (*contents.containers, *contents.entries) if EXTRA in name]:
        return
    saved = [
        (path, each)
        for path, each in contents.in_order
        if any(isinstance(key, str) and key.endswith(EXTRA) for key in path)
    ]
    for path, value in list(nodes(state_dict)):
        names = list(value) if isinstance(value, dict) else []
        for key in names:
            if not isinstance(key, str) or not key.endswith(EXTRA) or wraps(value[key]):
                continue
            at = (*path, key)
            found = {whole[len(at) :]: each for whole, each in saved if whole[: len(at)] == at}
            if (entry := found.get(())) is not None:
                value[key] = _blank(entry)
            elif found:
                value[key] = [] if isinstance(next(iter(found))[0], tuple) else {}


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets the value at `path`; creates the dicts and lists on the way."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(root, torch.Tensor):
            return  # what it wraps is filled in place
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
    items: Sequence[Item], content: Content, strict: bool, optional: tuple[str, ...] = ()
) -> tuple[list[Item], list[str]]:
    """Compares the parts of a state dict with a checkpoint. Names that only one side has are an
    error if `strict`, except those that begin with an `optional` prefix. Returns the items to load,
    and the names that this rank's state dict lacks; another rank's may have them. A
    `CheckpointMismatch` names the keys, shapes and dtypes that differ.
    """
    tensors, values = content.whole.tensors, content.whole.values
    names = {item.name for item in items}
    saved = {*tensors, *values}

    def required(missing: set[str]) -> list[str]:
        return sorted(name for name in missing if not name.startswith(optional))

    wrong = []
    for item in items:
        entry = tensors.get(item.name)
        if item.kind == "tensor" and entry is not None:
            if tuple(entry.shape) != item.shape:
                wrong.append(
                    f"{item.name!r} has shape {item.shape}, {tuple(entry.shape)} was saved"
                )
            elif entry.dtype != item.dtype:
                wrong.append(f"{item.name!r} is {item.dtype}, {entry.dtype} was saved")
        elif item.kind == "tensor" and item.name in values:
            wrong.append(f"{item.name!r} is a tensor, a value was saved")
        elif item.kind == "value" and entry is not None:
            wrong.append(f"{item.name!r} is a value, a tensor was saved")
        elif (whole := item.name.removesuffix(_SUBCLASS)) != item.name and whole in tensors:
            wrong.append(f"{whole!r} wraps tensors here, and is a plain tensor in the checkpoint")
        elif item.kind == "tensor" and item.name + _SUBCLASS in values:
            wrong.append(f"{item.name!r} is a plain tensor, a subclass that wraps some was saved")
    differences = _few("only in the state dict", required(names - saved) if strict else [])
    differences += _few("different", wrong)
    if differences:
        raise _mismatch(content.where, differences, only_names=not wrong)
    return [item for item in items if item.name in saved], required(saved - names)


def left_over(names: Sequence[str], where: str) -> CheckpointMismatch:
    """The error for names that no rank's state dict has."""
    return _mismatch(where, _few("only in the checkpoint", names), only_names=True)


def _mismatch(where: str, differences: Sequence[str], only_names: bool) -> CheckpointMismatch:
    advice = "Build the model and the optimizer as they were saved, or use another folder"
    if only_names:
        advice += "; strict=False of Checkpointer.restore ignores names that only one side has. "
        advice += "For a Job: restore the model with a Checkpointer, and give the job a new folder"
    return CheckpointMismatch(
        f"{where} does not fit the state dict: {'; '.join(differences)}. {advice}"
    )


def _few(what: str, names: Sequence[str]) -> list[str]:
    shown = [name if name.isprintable() and name else repr(name) for name in names]
    return [f"{what}: {listed(shown, _SHOWN)}"] if names else []


def check_mixture(
    state_dict: Mapping[str, Any],
    items: Sequence[Item],
    filled: Iterable[Any],
    content: Content,
) -> None:
    """Checks the tensors of a state dict that has DTensors; a `CheckpointMismatch` names the fix. A
    tensor that was saved in parts must not be whole here, nor a dict that was empty (`filled`) have
    got whole tensors (an optimizer's moments) of a DTensor's shape.
    """
    shapes = {tuple(leaf.shape) for _, leaf in nodes(state_dict) if isinstance(leaf, DTensor)}
    if not shapes:
        return
    added = {id(leaf) for each in filled for _, leaf in nodes(each)}
    whole = []
    for item in items:
        entry = content.whole.tensors.get(item.name)
        leaf = look_up(state_dict, item.path)
        if entry is None or not item.shape or not isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, DTensor) and (
            len(entry.shards) > 1 or (id(leaf) in added and item.shape in shapes)
        ):
            whole.append(repr(item.name))
    if whole:
        raise CheckpointMismatch(
            f"{content.where} cannot be restored into a mixture of DTensors and whole tensors: "
            f"{listed(whole, _SHOWN)} would be whole next to DTensors, which an "
            "optimizer cannot step. Build the state dict with get_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict, which creates the optimizer's state as "
            "DTensors, and load it with set_state_dict; or use outlast.Job"
        )
