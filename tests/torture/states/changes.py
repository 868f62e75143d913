"""How people change a program between a save and a restore, on a state as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from .cases import Leaf, Node, Spec, replaced, walk


def _transposed(value: torch.Tensor) -> torch.Tensor:
    found = torch.empty(value.shape[::-1], dtype=value.dtype)
    return found.permute(*reversed(range(value.dim())))


def _offset(value: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(value.numel() + 3, dtype=value.dtype)
    return whole[3:].view(value.shape)


def _conjugate(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=value.dtype).conj()


def _negative(value: torch.Tensor) -> torch.Tensor:
    made = torch._neg_view(torch.zeros(value.shape, dtype=value.dtype))
    made.resolve_neg()  # an error for a dtype that has no negative values
    return made


# Of a tensor in the target. Those of the first group change no value: they must not be refused.
_HARMLESS: dict[str, Callable[[Any], Any]] = {
    "transposed": _transposed,
    "offset": _offset,
    "conjugate": _conjugate,
    "parameter": lambda t: nn.Parameter(torch.zeros(t.shape, dtype=t.dtype), requires_grad=False),
    "negative": _negative,
}
_OTHER: dict[str, Callable[[Any], Any]] = {
    "other dtype": lambda t: torch.zeros(
        t.shape, dtype=torch.int32 if t.dtype is torch.float32 else torch.float32
    ),
    "other shape": lambda t: torch.zeros((2, *t.shape), dtype=t.dtype),
    "longer": lambda t: torch.zeros(
        [n + 1 for n in t.shape] if t.dim() else [1], dtype=t.dtype
    ),
    "expanded": lambda t: torch.zeros([1] * t.dim(), dtype=t.dtype).expand(t.shape),
    "float": lambda t: 0.5,
    "none": lambda t: None,
    "array": lambda t: np.zeros(tuple(t.shape), "f4"),
    "meta": lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"),
    "sparse": lambda t: torch.zeros(t.shape).to_sparse(),
    "tuple": lambda t: (t,),
}  # fmt: skip
_VALUES: dict[str, Callable[[Any], Any]] = {
    "other value": lambda value: 7,
    "no value": lambda value: None,
    "unsavable": lambda value: len,
}
_TENSOR: Callable[[Any], Any] = lambda value: torch.zeros(())  # noqa: E731


_NOT_IN_PLACE = ("sparse", "quantized", "nested", "mkldnn", "own dict", "own list", "flattens")
_NOT_IN_PLACE += ("random state",)  # NumPy's may be a dict
_NOT_IN_PLACE += tuple(f"sparse {each}" for each in ("csr", "csc", "bsr", "bsc"))


def changed(value: Any, leaf: Leaf) -> Any:
    """The object of a leaf, after its `op`. One that does not fit (a conjugate of floats) leaves it
    as it is.
    """
    ops = {**_HARMLESS, **_OTHER} if isinstance(value, torch.Tensor) else _VALUES
    op = {**ops, "tensor": _TENSOR}.get(leaf.op)
    try:
        return value if op is None else op(value)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return value


def change(spec: Node, r: Random) -> tuple[Node, bool, str]:
    """A changed program: what it restores into, whether that must be accepted, and what it is."""
    leaves = [(path, each) for path, each in walk(spec) if isinstance(each, Leaf)]
    nodes = [(path, each) for path, each in walk(spec) if isinstance(each, Node)]
    how = r.choice(_CHANGES)
    if how in ("tensor", "value"):
        found = [(p, leaf) for p, leaf in leaves if (leaf.family != "value") == (how == "tensor")]
        if not found:
            return spec, True, "no change"
        path, leaf = r.choice(found)
        harmless = r.random() < 0.5
        if how == "tensor":
            op = r.choice([*(_HARMLESS if harmless else _OTHER)])
        else:
            op = r.choice([*_VALUES]) if harmless else "tensor"
        new = dataclasses.replace(leaf, op=op, tie=0)
        # A value of a walk's own containers, or in a tied pair, may have another effect.
        harmless = harmless and leaf.kind not in _NOT_IN_PLACE
        return _as_node(replaced(spec, path, new)), harmless, f"{path} is {op}"
    if how in ("tied", "untied"):
        tensors = [(path, each) for path, each in leaves if each.family == "tensor"]
        if len(tensors) < 2:
            return spec, True, "no change"
        (path, _), (other, leaf) = r.sample(tensors, 2)
        tie = leaf.seed if how == "tied" else 0
        found_spec = replaced(spec, path, dataclasses.replace(leaf, tie=tie))
        found_spec = replaced(found_spec, other, dataclasses.replace(leaf, tie=tie))
        return _as_node(found_spec), False, f"{path} and {other} are {how}"
    path, node = r.choice(nodes if how != "as a list" else nodes[1:] or nodes)
    if how == "as a list" and not path:
        return spec, True, "no change"
    new_node, harmless = _of_node(node, how, r)
    return _as_node(replaced(spec, path, new_node)), harmless, f"{path}: {how}"


def _of_node(node: Node, how: str, r: Random) -> tuple[Node, bool]:
    entries = list(node.entries)
    extra: Spec = Leaf("tensor", "small", r.randrange(2**32))
    if how == "another kind" and node.kind != "list":
        return dataclasses.replace(node, kind=r.choice(("dict", "ordered", "default"))), True
    if how == "as a list":
        return Node("list", tuple(enumerate(each for _, each in entries))), False
    if how == "emptied":
        return dataclasses.replace(node, entries=()), False
    if not entries or how == "added":
        key = len(entries) if node.kind == "list" else "new"
        if r.random() < 0.3:
            extra = Leaf("value", "int", 3)
        return dataclasses.replace(node, entries=(*entries, (key, extra))), False
    if how == "reordered":
        r.shuffle(entries)
        if node.kind == "list":
            return Node("list", tuple(enumerate(each for _, each in entries))), False
        return dataclasses.replace(node, entries=tuple(entries)), True
    number = r.randrange(len(entries))
    key, inner = entries[number]
    if how == "removed":
        del entries[number]
    elif how == "renamed":
        entries[number] = ("renamed", inner)
    elif how == "another key":
        entries[number] = (str(key) if type(key) is int else f"{key}", inner)
    elif how == "deeper":
        entries[number] = (key, Node("dict", (("in", inner),)))
    if node.kind == "list":
        entries = list(enumerate(each for _, each in entries))
    return dataclasses.replace(node, entries=tuple(dict(entries).items())), False


def _as_node(spec: Spec) -> Node:
    assert isinstance(spec, Node)
    return spec


_CHANGES = (
    *("tensor", "tensor", "tensor", "value", "tied", "untied", "another kind", "as a list"),
    *("emptied", "added", "reordered", "removed", "renamed", "another key", "deeper"),
)
