"""A case: a nested state as data, from which every process builds the same objects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch

from .tensors import KINDS, NO, PERHAPS, YES, Source, part, pool
from .values import VALUES, Color, Mode, Number, OwnDict


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor, a value, or a part of a shared pool. Leaves with equal `tie` are one object. `op`
    is a change of it: see `changes`.
    """

    family: str
    kind: str
    seed: int
    tie: int = 0
    op: str = ""


@dataclasses.dataclass(frozen=True)
class Node:
    """A container: `dict`, `ordered`, `default`, `own` or `list`, whose keys are numbers."""

    kind: str
    entries: tuple[tuple[Any, Leaf | Node], ...]


Spec = Leaf | Node
Path = tuple[Any, ...]

KEYS = ("a", "b", "weight", "0", "1", 0, 1, -3, 7, "x y", "é", "'", "state", "param_groups", "_x")
ODD_KEYS: tuple[Any, ...] = (
    *("", "a.b", ".", "a\0", "\ud800", "__outlast__", "n\n", "x" * 300, 2**70),
    *(True, False, None, 2.5, (1, 2), b"k", Mode.TRAIN, Color.RED, Number.ONE, frozenset({1})),
)


class Keyed(str):
    """A text that prints as another one."""

    def __str__(self) -> str:
        return "other"


def _leaf(r: Random, wild: bool, pools: list[int], ties: list[Leaf]) -> Leaf:
    seed = r.randrange(2**32)
    if r.random() < 0.12:
        return Leaf("part", str(r.choice(pools)), seed)
    if ties and r.random() < 0.12:
        return r.choice(ties)
    family = "tensor" if r.random() < 0.6 else "value"
    kinds = KINDS if family == "tensor" else VALUES
    allowed = (YES, PERHAPS, NO) if wild and r.random() < 0.3 else (YES, PERHAPS)
    allowed = (YES,) if r.random() < 0.7 and not wild else allowed
    kind = r.choice([name for name, (_, savable) in kinds.items() if savable in allowed])
    found = Leaf(family, kind, seed)
    if family == "tensor" and r.random() < 0.3:
        found = dataclasses.replace(found, tie=seed)
        ties.append(found)
    return found


def _node(r: Random, wild: bool, depth: int, pools: list[int], ties: list[Leaf]) -> Node:
    kind = "dict" if not depth else r.choice(("dict", "dict", "list", "ordered", "default", "own"))
    count = r.choice((1, 1, 2, 3, 4)) if r.random() > 0.08 or not depth else 0
    entries: dict[Any, Spec] = {}
    for number in range(count):
        key: Any = number
        if kind != "list":
            odd = wild and r.random() < 0.12
            key = r.choice(ODD_KEYS) if odd else r.choice(KEYS)
            if odd and r.random() < 0.05:
                key = Keyed("k")
        if depth < 3 and r.random() < 0.3:
            entries[key] = _node(r, wild, depth + 1, pools, ties)
        else:
            entries[key] = _leaf(r, wild, pools, ties)
    return Node(kind, tuple(entries.items()))


def make_spec(seed: int) -> Node:
    """The state that the case of this seed saves."""
    r = Random(f"state/{seed}")
    pools = [r.randrange(1, 2**20) for _ in range(2)]
    return _node(r, r.random() < 0.35, 0, pools, [])


class Builder:
    """Makes the objects of a spec, with the contents of `fill`."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self._pools: dict[int, torch.Tensor] = {}
        self._tied: dict[Any, Any] = {}

    def build(self, spec: Spec) -> Any:
        from .changes import changed

        if isinstance(spec, Leaf):
            if not spec.tie:
                return changed(self._made(spec), spec)
            if (spec.tie, spec.op) not in self._tied:
                self._tied[spec.tie, spec.op] = changed(self._made(spec), spec)
            return self._tied[spec.tie, spec.op]
        inner = [(key, self.build(each)) for key, each in spec.entries]
        if spec.kind == "list":
            return [value for _, value in inner]
        if spec.kind == "ordered":
            return collections.OrderedDict(inner)
        if spec.kind == "default":
            return collections.defaultdict(list, inner)
        return OwnDict(inner) if spec.kind == "own" else dict(inner)

    def _made(self, leaf: Leaf) -> Any:
        if leaf.family == "part":
            number = int(leaf.kind)
            if number not in self._pools:
                self._pools[number] = pool(number, self.fill)
            return part(self._pools[number], leaf.seed)
        kinds = KINDS if leaf.family == "tensor" else VALUES
        return kinds[leaf.kind][0](Source(leaf.seed, self.fill))


def walk(spec: Spec, path: Path = ()) -> Iterator[tuple[Path, Spec]]:
    """Every part with its path, each before what it holds."""
    yield path, spec
    for key, inner in spec.entries if isinstance(spec, Node) else ():
        yield from walk(inner, (*path, key))


def name(path: Path) -> str:
    """The flat name, as torch.distributed.checkpoint has it."""
    return ".".join(map(str, path))


def savable(spec: Spec) -> str:
    """Whether a save must accept a state: `yes`, `no` or `perhaps`."""
    found = {
        (KINDS if each.family == "tensor" else VALUES)[each.kind][1]
        for _, each in walk(spec)
        if isinstance(each, Leaf) and each.family != "part"
    }
    names = [name(path) for path, _ in walk(spec)]
    keys = [key for path, _ in walk(spec) for key in path]
    odd = any(type(key) not in (str, int) or key in ODD_KEYS for key in keys)
    odd = odd or len({*names}) < len(names) or any(
        isinstance(each, Node) and each.kind == "own" for _, each in walk(spec)
    )  # fmt: skip
    return NO if NO in found else PERHAPS if odd or PERHAPS in found else YES


def replaced(spec: Spec, path: Path, new: Spec | None) -> Spec:
    """The spec with another part at `path`, or without it."""
    if not path:
        assert new is not None
        return new
    assert isinstance(spec, Node)
    entries = []
    for key, inner in spec.entries:
        if key is path[0] or (type(key) is type(path[0]) and key == path[0]):
            if len(path) > 1:
                entries.append((key, replaced(inner, path[1:], new)))
            elif new is not None:
                entries.append((key, new))
        else:
            entries.append((key, inner))
    if spec.kind == "list":
        entries = list(enumerate(inner for _, inner in entries))
    return dataclasses.replace(spec, entries=tuple(entries))


def text(spec: Spec) -> str:
    """A spec, as one reads it in a report."""
    if isinstance(spec, Leaf):
        tie = f" tied {spec.tie % 1000}" if spec.tie else ""
        of = f" of pool {spec.kind}" if spec.family == "part" else f" {spec.kind}"
        return f"<{spec.family}{of} #{spec.seed}{tie}{f' as {spec.op}' if spec.op else ''}>"
    inner = ", ".join(f"{key!r}: {text(each)}" for key, each in spec.entries)
    return f"{spec.kind}({inner})"


def dense(value: Any) -> Any:
    """The state with a plain tensor of the same shape in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        try:
            return torch.zeros(value.shape, dtype=value.dtype)
        except (RuntimeError, ValueError, NotImplementedError):
            return value
    if isinstance(value, Mapping):
        found = OwnDict() if isinstance(value, OwnDict) else dict[Any, Any]()
        found.update({key: dense(inner) for key, inner in value.items()})
        return found
    return [dense(each) for each in value] if type(value) is list else value
