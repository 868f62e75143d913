"""Which parameters a rank holds, and how they are divided into the slices that are hashed in turn.

A *piece* is a part of a large parameter, or one or more small ones: it has one digest. A *slice* is
the pieces that are hashed during one step. Both depend only on names, shapes and data types, so
that all ranks that hold the same parameters divide them in the same way, and hash the same slice
after the same step.

Ranks are compared if they hold the same parameters, and of each DTensor the same shard: if their
coordinates are equal in all mesh dimensions along which a placement is not `Replicate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import torch
import xxhash
from torch import nn

from outlast.async_checkpoint.subclasses import parts
from outlast.elastic.tensors import local, shard_of

_MOST_PIECES = 512
_LEAST_BYTES = 1 << 20  # of a slice: a small model is hashed during one step
# The same of a slice that the training thread looks at.
_SLICE_BYTES = 1 << 17
_SLICE_TENSORS = 4  # each costs a few microseconds, whatever its size


@dataclasses.dataclass(frozen=True)
class Part:
    """The bytes `begin` to `end` of the parameter with this number."""

    parameter: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one digest covers; `label` names it in messages."""

    label: str
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters of this rank."""

    parameters: tuple[torch.Tensor, ...]  # those that this rank holds a part of
    slices: tuple[tuple[Piece, ...], ...]  # by the step of a cycle after which they are hashed
    signature: str  # equal on ranks that hold the same
    size_bytes: int  # of this rank's parts

    @classmethod
    def of(cls, module: nn.Module, every: int) -> Layout:
        """Divides `module` into at most `every` slices; a `ValueError` if a wrapper prevents it."""
        held: list[tuple[str, torch.Tensor, int]] = []
        described: list[str] = []
        for name, parameter in module.named_parameters():
            _check_comparable(name, parameter)
            where = shard_of(parameter)
            if where is None:
                continue
            for of, each in parts(parameter, name):
                own = local(each)
                held.append((of, each, own.nbytes))
                described.append(f"{of} {own.dtype} {tuple(own.shape)} {own.device.type} {where}")
        sizes = [(name, nbytes) for name, _, nbytes in held]
        total = sum(nbytes for _, nbytes in sizes)
        return cls(
            parameters=tuple(parameter for _, parameter, _ in held),
            slices=_slices(_pieces(sizes, total), total, every),
            signature=xxhash.xxh3_64_hexdigest("\n".join(described).encode()),
            size_bytes=total,
        )

    @property
    def labels(self) -> list[str]:
        """The labels of all pieces, in the order of their digests."""
        return [piece.label for pieces in self.slices for piece in pieces]


def element_slices(
    parameters: list[torch.Tensor], every: int
) -> list[list[tuple[torch.Tensor, int, int]]]:
    """At most `every` slices, each a list of a parameter, its first and its last element."""
    tensors = [local(p) for p in parameters]
    limit = max(_SLICE_BYTES, -(-sum(t.nbytes for t in tensors) // every))
    most = max(_SLICE_TENSORS, -(-len(tensors) // every))
    found: list[list[tuple[torch.Tensor, int, int]]] = [[]]
    room = limit
    for parameter, tensor in zip(parameters, tensors, strict=True):
        begin, count = 0, tensor.numel()
        while begin < count:
            if found[-1] and (room < tensor.itemsize or len(found[-1]) == most):
                found.append([])
                room = limit
            end = min(count, begin + max(room // tensor.itemsize, 1))
            found[-1].append((parameter, begin, end))
            room -= (end - begin) * tensor.itemsize
            begin = end
    size = -(-len(found) // every)  # the two limits may give more slices than either
    return [list(chain(*found[at : at + size])) for at in range(0, len(found), size)]


def _check_comparable(name: str, parameter: nn.Parameter) -> None:
    if getattr(parameter, "_is_flat_param", False) or type(parameter).__name__ == "FlatParameter":
        raise ValueError(
            f"the parameter {name!r} is a part of a FullyShardedDataParallel module, whose ranks "
            "cannot be compared: use fully_shard (FSDP2)"
        )


def _pieces(sizes: Sequence[tuple[str, int]], total: int) -> list[Piece]:
    """One piece for each parameter, except that large ones are cut and small ones are joined."""
    limit = max(total // _MOST_PIECES, 1)
    longest, joins = max(limit, _LEAST_BYTES), len(sizes) > _MOST_PIECES
    found: list[Piece] = []
    names: list[str] = []  # of those that are joined next
    parts: list[Part] = []

    def flush() -> None:
        if parts:
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            found.append(Piece(label, tuple(parts)))
        names.clear()
        parts.clear()

    for number, (name, nbytes) in enumerate(sizes):
        if nbytes > longest:
            flush()
            for begin in range(0, nbytes, longest):
                end = min(begin + longest, nbytes)
                found.append(Piece(f"{name} (bytes {begin} to {end})", (Part(number, begin, end),)))
            continue
        names.append(name)
        parts.append(Part(number, 0, nbytes))
        if not joins or sum(part.end for part in parts) >= limit:
            flush()
    flush()
    return found


def _slices(pieces: Sequence[Piece], total: int, every: int) -> tuple[tuple[Piece, ...], ...]:
    """At most `every` slices of about equal size."""
    limit = max(-(-total // every), _LEAST_BYTES)
    slices: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        nbytes = sum(part.end - part.begin for part in piece.parts)
        # With the last slice that a cycle has room for, the rest goes into that one.
        if not slices or (size + nbytes > limit and len(slices) < every):
            slices.append([])
            size = 0
        slices[-1].append(piece)
        size += nbytes
    return tuple(tuple(each) for each in slices)
