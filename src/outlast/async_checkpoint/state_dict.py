"""State dicts: walks of nested state, of dicts, lists, and tensors that wrap others.

A path is a tuple of keys; the index of a list is a tuple, `(i,)`: unlike a number as a dict key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from outlast.async_checkpoint.subclasses import SUBCLASS, inner, wraps
from outlast.errors import CheckpointUnsavable
from outlast.system.main_program import without_collections

V = TypeVar("V")
Path = tuple[Any, ...]

_DEEP = 150  # levels, for messages
ANY_SIZE = "outlast_any_size"  # the attribute of a tensor that `of_any_size` returns
# Most leaves are of these types: to look at the type alone makes a walk twice as fast.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
PLAIN = _TENSORS | {int, float, bool, str, type(None)}


class Last(Generic[V]):
    """Remembers the value of the last key. Another key replaces it: nothing else invalidates it."""

    def __init__(self) -> None:
        self._entry: tuple[Any, V] | None = None

    def of(self, key: Any, make: Callable[[], V]) -> V:
        """The value of `key`, made by `make` unless the last key was equal."""
        entry = self._entry
        value = entry[1] if entry is not None and entry[0] == key else without_collections(make)
        # In one step, so another thread never sees a key without its value; and the newer of two
        # equal keys, so the mesh of a destroyed process group is not kept alive.
        self._entry = key, value
        return value


def of_any_size(tensor: torch.Tensor) -> torch.Tensor:
    """What a restore replaces by a tensor of the size that was saved."""
    setattr(found := tensor.detach(), ANY_SIZE, True)
    return found


def is_leaf(value: Any) -> bool:
    """Whether a walk does not go into `value`."""
    if type(value) in PLAIN or type(value) is dict:  # most are of these types
        return type(value) is not dict
    is_wrapper = isinstance(value, torch.Tensor) and wraps(value)
    return not (is_wrapper or isinstance(value, Mapping | list))


def nodes(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every dict, list and leaf of a state with its path, each before what it holds."""
    found = [(path, value)]
    if not is_leaf(value):
        _add_nodes(found, value, path)
    return found


def _add_nodes(found: list[tuple[Path, Any]], value: Any, path: Path) -> None:
    is_list = isinstance(value, list)
    for key, each in inner_of(value):
        at = (*path, (key,) if is_list else key)
        found.append((at, each))
        if type(each) not in PLAIN and not is_leaf(each):
            _add_nodes(found, each, at)


def leaf_numbers(state: Any) -> dict[Path, int]:
    """The place of each leaf among all leaves of a state, by its path."""
    leaves = (path for path, value in nodes(state) if is_leaf(value))
    return {path: number for number, path in enumerate(leaves)}


def wrappers(state: Any) -> list[tuple[Path, dict[str, Any]]]:
    """The dicts in a state that was loaded which stand for tensors that wrap others."""
    return [(path, v) for path, v in nodes(state) if isinstance(v, dict) and SUBCLASS in v]


def replaced(state: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """As `tree_map_only` of torch, whose own walk takes most of the time of a small restore."""
    of = type(state)
    if of is dict:
        return {key: replaced(each, kind, by) for key, each in state.items()}
    if of is list or of is tuple:
        return of([replaced(each, kind, by) for each in state])
    if isinstance(state, kind):
        return by(state)
    return state if of in PLAIN else tree_map_only(kind, by, state)


def look_up(state: Any, path: Path) -> Any:
    """The value at `path`."""
    for key in path:
        if isinstance(state, torch.Tensor):
            state = inner(state)[SUBCLASS] if key == SUBCLASS else getattr(state, key)
        else:
            state = state[key[0] if isinstance(key, tuple) else key]
    return state


def torch_path(path: Path) -> Path:
    """The path as torch.distributed.checkpoint has it: every key of a dict is text."""
    return tuple([key[0] if type(key) is tuple else str(key) for key in path])


def signature_and_leaves(state: Any) -> tuple[list[Any], list[Any]]:
    """The signature, which is equal for two states with the same parts, and the leaves in order.

    Every save calls this on the training thread: it must be cheap, so it builds no paths. A
    `CheckpointUnsavable` if the state contains itself, or is nested too deeply.
    """
    signature: list[Any] = []
    leaves: list[Any] = []
    try:
        _walk(state, signature, leaves)
    except RecursionError:
        raise too_deep(state) from None
    except RuntimeError:
        for path, value in nodes(state):  # names a tensor that has no shape
            if isinstance(value, torch.Tensor):
                check_savable(path, value)
        raise
    return signature, leaves


def too_deep(state: Any) -> CheckpointUnsavable:
    """The error for a state that is too deep to be walked; names the cycle if there is one."""
    at: list[tuple[str, Any, Iterator[tuple[Any, Any]]]] = [("", state, inner_of(state))]
    while at:
        for key, value in at[-1][2]:
            path = ".".join([*(each[0] for each in at[1:]), str(key)])
            for depth, (_, outer, _) in enumerate(at):
                if outer is value:
                    whole = ".".join(each[0] for each in at[1 : depth + 1]) or "the state dict"
                    return CheckpointUnsavable(
                        f"{path!r} cannot be saved: it is {whole} again, which contains it"
                    )
            if not is_leaf(value):
                if len(at) > _DEEP:
                    return CheckpointUnsavable(f"{path!r} cannot be saved: it is nested too deeply")
                at.append((str(key), value, inner_of(value)))
                break
        else:
            at.pop()
    return CheckpointUnsavable("the state dict cannot be saved: it is nested too deeply")


def inner_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The keys or indexes, and the values, of a dict, a list, or a tensor that wraps others."""
    if type(value) is dict:
        return iter(list(value.items()))
    found = inner(value) if isinstance(value, torch.Tensor) else value
    return iter(list(enumerate(found) if isinstance(found, list) else found.items()))


def _walk(value: Any, signature: list[Any], leaves: list[Any]) -> None:
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and type(value) not in PLAIN and wraps(value):
        value, is_tensor = inner(value), False
    if is_tensor:
        leaves.append(value)
        spec = getattr(value, "_spec", None)  # of a DTensor: its mesh and placements
        if spec is not None:
            signature.append((value.shape, value.dtype, spec.placements, spec.mesh))
        elif hasattr(value, "local_shards"):
            shards = [shard.metadata for shard in value.local_shards()]
            parts = [(m.shard_offsets, m.shard_sizes) for m in shards]
            whole = value.metadata()
            signature.append((whole.size, whole.tensor_properties.dtype, parts))
        else:
            signature.append((value.shape, value.dtype, value.layout))
    elif type(value) is dict or isinstance(value, Mapping):
        signature.append((tuple(value), tuple(map(type, value)), type(value)))  # True == 1
        for each in value.values():
            if type(each) in _TENSORS:  # here: a call for each one would take as long again
                leaves.append(each)
                signature.append((each.shape, each.dtype, each.layout))
            elif type(each) is DTensor:
                leaves.append(each)
                spec = each._spec
                signature.append((each.shape, each.dtype, spec.placements, spec.mesh))
            else:
                _walk(each, signature, leaves)
    elif isinstance(value, list):
        signature.append(len(value))
        for each in value:
            _walk(each, signature, leaves)
    else:
        signature.append(None)
        leaves.append(value)


def check_savable(path: Path, tensor: torch.Tensor) -> None:
    """Raises a `CheckpointUnsavable` for a tensor that has no data, or none that can be saved."""
    if why := _why_unsavable(tensor):
        name = ".".join(map(str, torch_path(path)))
        raise CheckpointUnsavable(f"{name!r} is {why}")


def _why_unsavable(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "an uninitialized parameter, which has no data"
    if tensor.is_meta:
        return "a meta tensor, which has no data"
    if hasattr(tensor, "local_shards"):  # a ShardedTensor has few attributes of a tensor
        return ""
    kind = "oneDNN" if tensor.is_mkldnn else "nested" if tensor.is_nested else ""
    is_value = tensor.layout == torch.jagged  # it is pickled
    return f"a {kind} tensor, which cannot be saved" if kind and not is_value else ""
