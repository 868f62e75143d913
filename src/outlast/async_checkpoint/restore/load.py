"""Loads the content of a checkpoint into the parts of a state dict, resharded as needed.

If a saved part and a part of this rank are the same, the bytes are read into the tensor itself. If
they overlap only in part, or the tensor is on a GPU, they go through a bounded temporary buffer.

What is read is known before any memory is taken for it: `batches` says it, in an order that is the
same on ranks that load the same (`shared_read`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from outlast.async_checkpoint import torch_values
from outlast.async_checkpoint.plain_values import decode
from outlast.async_checkpoint.restore.fit import Content, put
from outlast.async_checkpoint.restore.verified_read import Piece, Source, check_sizes, read_verified
from outlast.async_checkpoint.snapshot.plan import Item
from outlast.async_checkpoint.snapshot.structure import check_not_freed, local_view
from outlast.async_checkpoint.state_dict import look_up
from outlast.async_checkpoint.storage.entries import Shard
from outlast.async_checkpoint.subclasses import SUBCLASS, check_same
from outlast.errors import CheckpointMismatch
from outlast.system.error_text import first_line
from outlast.system.shared_memory import memory_at

T = TypeVar("T")
_TEMPORARY_BYTES = 256 << 20  # at a time
Part = tuple[Item, torch.Tensor]  # of this rank, with its view
Extent = tuple[str, int, int]  # a file, the first byte, and how many
Read = Callable[[Source, Sequence[Piece]], object]
Values = list[tuple[Item, Any]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is read at once: where it is, the memory for it, and what is done when it is there."""

    source: Source
    extents: Sequence[Extent]
    pieces: Callable[[], list[Piece]]
    finish: Callable[[], object] = lambda: None


def load(
    reads: deque[Batch], state_dict: dict[str, Any], values: Values, read: Read = read_verified
) -> None:
    """Fills `state_dict`: with tensors, all `reads` of which `read` makes, and then with these
    values. A `CheckpointError` at the first byte that differs from what was written.
    """
    while reads:
        batch = reads.popleft()  # its temporary memory goes with it
        read(batch.source, batch.pieces())
        batch.finish()
    for item, value in values:
        put(state_dict, item.path, value)


def load_values(
    content: Content, state_dict: Mapping[str, Any], items: Sequence[Item], weights_only: bool
) -> Values:
    """The values, for `load`. Raises as that, and a `CheckpointError` for one that cannot be
    unpickled without running code.
    """
    sources = (_load_values(each, state_dict, items, weights_only) for each in content.sources)
    return [each for found in sources for each in found]


def batches(
    content: Content, state_dict: Mapping[str, Any], items: Sequence[Item]
) -> Iterator[Batch]:
    """The reads of tensors, in the order in which they are made."""
    tensors = [item for item in items if item.kind == "tensor"]
    with torch.no_grad():  # else the view of each DTensor is noted for its gradient
        parts = [(item, local_view(look_up(state_dict, item.path), item)) for item in tensors]
    check_not_freed(parts)
    shared = _sharing(parts)
    later = {id(second[1]) for _, second in shared}
    for source in content.sources:
        yield from _batches(source, [each for each in parts if id(each[1]) not in later])
    for first, second in shared:
        yield from _shared_batches(content, first, second)


def _sharing(parts: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Pairs of parts whose memory overlaps, or lies between the elements of the other one."""
    found = []
    at = [(str(t.device), t.data_ptr(), (item, t)) for item, t in parts if t.nbytes]
    before: tuple[str, int, Part] | None = None  # device, end, and the part that ends there
    for device, begin, part in sorted(at, key=lambda each: each[:2]):
        tensor = part[1]
        steps = (s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        end = begin + (sum(steps) + 1) * tensor.element_size()
        if begin and before is not None and before[0] == device and begin < before[1]:
            found.append((before[2], part))
        if before is None or before[0] != device or end > before[1]:
            before = device, end, part
    return found


def _shared_batches(content: Content, first: Part, second: Part) -> Iterator[Batch]:
    """Of the second part, which shares memory with the first one, as tied weights do: what was
    saved for both must agree.
    """

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    compared = [second]
    if place(first[1]) != place(second[1]):
        compared = [first, second]
        for source in content.sources:
            yield from _batches(source, compared[1:])
    for item, part in compared:
        again = torch.empty(part.shape, dtype=part.dtype)
        for source in content.sources:
            yield from _batches(source, [(item, again)])
        yield Batch(content.sources[0], [], list, partial(_check_same, part, again, first, second))


def _check_same(part: torch.Tensor, again: torch.Tensor, first: Part, second: Part) -> None:
    if not _same_bits(part.cpu(), again):
        raise CheckpointMismatch(
            f"{first[0].name!r} and {second[0].name!r} share memory here, as tied weights do, "
            "and different values were saved for them: build the model as it was saved"
        )


def _batches(source: Source, parts: Sequence[Part]) -> Iterator[Batch]:
    direct: list[Piece] = []
    indirect: list[_Indirect] = []
    for item, part in parts:
        entry = source.contents.tensors.get(item.name)
        if entry is None:
            continue
        is_plain = part.is_contiguous() and not part.is_conj() and not part.is_neg()
        for shard in entry.shards:
            same = tuple(shard.offsets) == item.offsets and tuple(shard.sizes) == item.sizes
            if not (same and part.nbytes) and not _overlaps(shard, item):
                continue
            has_bytes = is_plain and (part.data_ptr() != 0 or not part.nbytes)
            if same and part.device.type == "cpu" and has_bytes:
                direct.append(Piece(shard.file, shard.at, part.nbytes, part.data_ptr(), part))
            else:
                indirect.append(_Indirect(shard, item, part))
    if direct:
        extents = [(each.file, each.at, each.size_bytes) for each in direct]
        yield Batch(source, extents, lambda: direct)
    while indirect:
        size_bytes, some = 0, list[_Indirect]()
        while indirect and size_bytes < _TEMPORARY_BYTES:
            some.append(indirect.pop(0))
            size_bytes += some[-1].extent[2]
        yield Batch(
            source,
            [each.extent for each in some],
            partial(_of_each, _Indirect.piece, some),
            partial(_of_each, _Indirect.finish, some),
        )


def _of_each(method: Callable[[_Indirect], T], parts: Sequence[_Indirect]) -> list[T]:
    return [method(each) for each in parts]


class _Indirect:
    """A part that is read into temporary memory first."""

    def __init__(self, shard: Shard, item: Item, part: torch.Tensor) -> None:
        self._shard, self._item, self._part = shard, item, part
        # The rows of the saved part that this rank needs: contiguous bytes, however the other
        # dimensions are cut.
        self._low, high = 0, 1
        if shard.sizes:
            self._low = max(item.offsets[0] - shard.offsets[0], 0)
            high = min(item.offsets[0] + item.sizes[0] - shard.offsets[0], shard.sizes[0])
        row_bytes = math.prod(shard.sizes[1:]) * part.element_size()
        self._sizes = [high - self._low, *shard.sizes[1:]] if shard.sizes else []
        size_bytes = (high - self._low) * row_bytes
        self.extent: Extent = (shard.file, shard.at + self._low * row_bytes, size_bytes)
        self._temporary: torch.Tensor | None = None

    def piece(self) -> Piece:
        temporary = self._temporary = torch.empty(self._sizes, dtype=self._part.dtype)
        return Piece(*self.extent, temporary.data_ptr(), temporary)

    def finish(self) -> None:
        assert self._temporary is not None
        views = _views(self._shard, self._item, self._part, self._temporary, self._low)
        _write(*views, self._item)
        self._temporary = None


def _write(to: torch.Tensor, loaded: torch.Tensor, item: Item) -> None:
    """Writes into a view of any layout. Elements of it may share memory, as in an expanded tensor:
    then those that were saved must be equal, too.
    """
    once, values = to, loaded
    for dim, stride in enumerate(to.stride()):
        if stride == 0 and to.shape[dim] > 1:
            once, values = once.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.no_grad():
        once.copy_(values)
    if torch._debug_has_internal_overlap(to) != 0 and not _same_bits(to.cpu(), loaded):
        raise CheckpointMismatch(
            f"elements of {item.name!r} share their memory here, as in an expanded tensor, and "
            "different values were saved for them: clone() it"
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Not `contiguous`, which leaves the strides of a single element.
    packed = (torch.clone(t, memory_format=torch.contiguous_format) for t in (a, b))
    flat = (t.resolve_conj().resolve_neg().view(-1).view(torch.uint8) for t in packed)
    return torch.equal(*flat)


def _overlaps(shard: Shard, item: Item) -> bool:
    return all(
        so < io + n and io < so + m
        for so, m, io, n in zip(shard.offsets, shard.sizes, item.offsets, item.sizes, strict=True)
    )


def _views(
    shard: Shard, item: Item, part: torch.Tensor, read: torch.Tensor, low: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The overlap: its view of this rank's part, and its view of the rows that were read."""
    to = part
    for dim, (begin, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        first = max(begin, item.offsets[dim])
        length = min(begin + size, item.offsets[dim] + item.sizes[dim]) - first
        to = to.narrow(dim, first - item.offsets[dim], length)
        read = read.narrow(dim, first - begin - (low if dim == 0 else 0), length)
    return to, read


def _load_values(
    source: Source, state_dict: Mapping[str, Any], items: Sequence[Item], weights_only: bool
) -> list[tuple[Item, Any]]:
    saved = source.contents.values
    wanted = [(item, saved[item.name]) for item in items if item.name in saved]
    check_sizes(source, {entry.file for _, entry in wanted})
    buffers = [torch.empty(entry.size_bytes, dtype=torch.uint8) for _, entry in wanted]
    read_verified(
        source,
        [
            Piece(entry.file, entry.at, entry.size_bytes, buffer.data_ptr(), buffer)
            for (_, entry), buffer in zip(wanted, buffers, strict=True)
        ],
        threads=1,
    )
    found = []
    for (item, _), buffer in zip(wanted, buffers, strict=True):
        data = bytes(memory_at(buffer.data_ptr(), buffer.nbytes))
        present = look_up(state_dict, item.path)
        try:
            plain = torch_values.read(data, weights_only=weights_only)
            value = decode(plain, like=present)
        except Exception as e:
            raise CheckpointMismatch(
                f"the value {item.name!r} of {source.where} cannot be loaded: {first_line(e)}. If "
                "you trust the checkpoint, weights_only=False loads any Python object"
            ) from e
        if item.path[-1] == SUBCLASS and present is not None:
            check_same(item.name.removesuffix(f".{SUBCLASS}"), value, present)
        found.append((item, value))
    return found
