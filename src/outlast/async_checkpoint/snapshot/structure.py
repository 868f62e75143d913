"""The parts of a state dict that this rank saves: tensors, their layout, and pickled values.

A rank's tensors have the same layout in the snapshot buffer as in its files. The files have the
format of torch.distributed.checkpoint: one `torch.save` stream for each tensor, one after another.
The bytes around a tensor's data in its stream depend on its dtype and shape only (`Frame`), and are
written into the buffer once. A save then copies only the tensors' data, to its offset in the file.

The frames are made by torch: `torch.save` runs under `torch.serialization.skip_data` on a tensor
that is never filled, into a file object that records where torch skips. torch leaves the CRC-32 of
a skipped record at zero, which `torch.load` does not check; our checksums are in the manifest.
"""

from __future__ import annotations

import collections
import functools
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from outlast.async_checkpoint.plain_values import Unsavable, encode
from outlast.async_checkpoint.snapshot.plan import Item, Key
from outlast.async_checkpoint.state_dict import Last, leaf_numbers, look_up
from outlast.async_checkpoint.storage.entries import (
    ITEM_BYTES,
    Container,
    Shard,
    TensorEntry,
    ValueEntry,
    to_json,
)
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.errors import CheckpointError, CheckpointUnsavable
from outlast.system.shared_memory import SharedMemory, page_up

_SIMPLE = (int, float, str, bool, type(None))
_ALIGNMENT = 64  # of a tensor's stream; torch aligns the tensor's bytes in it the same way
# A file that has this size gets no more tensors, so that several files are written and read in
# parallel. A tensor is never split.
FILE_BYTES = 256 << 20
_TOGETHER_BYTES = 64 << 10  # a larger tensor keeps its place in the order of the state
_BEYOND_STORAGES = 1 << 44  # an address that is no offset in a storage
_SMALL_BYTES = 8 << 10  # in the time of Python's work for one part, this much is copied


def values_file(rank: int) -> str:
    """The file of a rank's values, whose size differs from save to save."""
    return f"__{rank}_values.distcp"


class Frame(NamedTuple):
    """The bytes that `torch.save` writes around the data of a tensor, which has these strides."""

    head: bytes
    data_bytes: int
    tail: bytes
    strides: tuple[int, ...]
    size_bytes: int


class _Recorder:
    """A file object that keeps the bytes before and after the part that is skipped."""

    def __init__(self) -> None:
        self.parts = [bytearray(), bytearray()]
        self.skipped = 0

    def write(self, data: Any) -> int:
        self.parts[1 if self.skipped else 0] += bytes(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.skipped += offset
        return offset

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=65536)
def frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor of `dtype` (without `torch.`) and `shape`."""
    recorder = _Recorder()
    # Its memory is reserved, but no page of it is ever touched.
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    with torch.serialization.skip_data():
        torch.save(tensor, recorder)  # type: ignore[arg-type]  # all that it uses of a file
    head, tail = map(bytes, recorder.parts)
    size_bytes = len(head) + recorder.skipped + len(tail)
    return Frame(head, recorder.skipped, tail, tensor.stride(), size_bytes)


class TensorExtent(NamedTuple):
    """The place of a tensor: its stream and its data in the file, its data in the buffer."""

    file: str
    stream_at: int
    stream_bytes: int
    data_at: int
    buffer_at: int
    data_bytes: int


class Structure:
    """The parts of a state dict that this rank saves: those of `items` whose key is in `keys`. The
    same ones give the same structure on any rank.

    Attributes:
        items: as given.
        tensors, extents: the tensors, and the place of each.
        small: which of them are worth no call, by their numbers.
        values: what is pickled.
        entries, containers: of tensors and of dicts, as a manifest has them.
        value_entries: likewise of `values`; where they are in their file differs between saves.
        files: name, offset in the buffer and size of each file of tensors, in whole pages.
        size_bytes: the size of the buffer.
        index: what is saved and where, as JSON, for a process that takes the snapshot over.
        digest: the hash of that.
    """

    def __init__(self, items: Sequence[Item], keys: Collection[Key], rank: int) -> None:
        self.items = items
        self.tensors: list[Item] = []
        self.values: list[Item] = []
        self.extents: list[TensorExtent] = []
        self.entries: dict[str, TensorEntry] = {}
        self.value_entries: list[tuple[str, ValueEntry]] = []
        self.containers: dict[str, Container] = {}
        self.files: list[tuple[str, int, int]] = []
        self.size_bytes = 0
        self.small: list[int] = []
        self._frames: list[Frame] = []
        self._lay_out(set(keys), rank)
        values = [[name, entry.path, entry.order] for name, entry in self.value_entries]
        index = {"tensors": self.entries, "values": values, "containers": self.containers}
        content = to_json(index)
        self.index, self.digest = content.decode(), checksum(content)
        self._leaves: list[int] = []
        self._pickled: dict[str, Last[bytes]] = collections.defaultdict(Last)

    def inscribe(self, memory: SharedMemory) -> Callable[[int], torch.Tensor]:
        """Writes the frames into the buffer; returns what gives the view of it that a save fills,
        by the number of the tensor. A view is made at its first use, because many tensors are
        copied by their addresses only.
        """
        view = memory.view
        for around, extent in zip(self._frames, self.extents, strict=True):
            begin, end = extent.buffer_at, extent.buffer_at + extent.data_bytes
            view[begin - len(around.head) : begin] = around.head
            view[end : end + len(around.tail)] = around.tail
        typed = functools.cache(lambda dtype: torch.frombuffer(view, dtype=torch.uint8).view(dtype))

        @functools.cache
        def target(number: int) -> torch.Tensor:
            item, extent = self.tensors[number], self.extents[number]
            dtype, strides = getattr(torch, item.dtype), frame(item.dtype, item.sizes).strides
            if not extent.data_bytes:  # it has no aligned offset
                return torch.empty(item.sizes, dtype=dtype)
            at = extent.buffer_at // dtype.itemsize
            return typed(dtype).as_strided(item.sizes, strides, at)

        return target

    def number(self, state_dict: Mapping[str, Any]) -> None:
        """Stores the position of each tensor among the leaves of a state dict of this structure."""
        numbers = leaf_numbers(state_dict)
        self._leaves = [numbers[item.path] for item in self.tensors]

    def sources(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """This rank's part of each of `tensors`, and its address, 0 if it has none; `leaves` are
        those of `signature_and_leaves`.
        """
        found: list[torch.Tensor] = []
        for item, number in zip(self.tensors, self._leaves, strict=True):
            leaf = leaves[number]
            part = leaf.to_local() if type(leaf) is DTensor else leaf
            # A plain tensor has the planned shape, which is in the signature.
            fits = type(part) is torch.Tensor and (part is leaf or part.shape == item.sizes)
            plain = fits and not (part.is_meta or part.is_conj() or part.is_neg())
            found.append(part if plain else local_part(leaf, item))
        addresses = [part.data_ptr() for part in found]
        parts = zip(self.tensors, found, addresses, strict=True)
        check_not_freed([(item, part) for item, part, at in parts if at < _BEYOND_STORAGES])
        return found, addresses

    def pickle_values(self, state_dict: Mapping[str, Any]) -> tuple[bytes, list[list[int]]]:
        """The values, serialized by torch one after another; and the offset and size of each."""
        parts: list[bytes] = []
        places: list[list[int]] = []
        at = 0
        for item in self.values:
            value = look_up(state_dict, item.path)
            if (key := _key(value)) is not None:
                pickled = functools.partial(_pickle, item, value)
                data = self._pickled[item.name].of(key, pickled)
            else:
                data = _pickle(item, value)
            places.append([at, len(data)])
            parts.append(data)
            at += len(data)
        return b"".join(parts), places

    def difference(self, index: str) -> str:
        """In what it differs from a structure with that `index`, in words; empty if in nothing."""
        before, now = (json.loads(each) if each else {} for each in (index, self.index))
        for kind in ("tensors", "values", "containers"):
            held, wanted = before.get(kind, {}), now[kind]
            if held != wanted:
                # Values are listed, with their names first.
                names = [
                    {e if isinstance(e, str) else e[0] for e in each} for each in (held, wanted)
                ]
                only = sorted(names[0] ^ names[1])[:3]
                return f"other {kind} {only}" if only else f"another order or layout of {kind}"
        return ""

    def _lay_out(self, chosen: Collection[Key], rank: int) -> None:
        begin, at = 0, 0  # offset of the current file in the buffer; offset in the file
        file, of_values = f"__{rank}_0.distcp", values_file(rank)
        mine: list[tuple[int, Item]] = []
        for order, item in enumerate(self.items):
            if item.kind == "container":
                of_dict: Any = item.dtype
                self.containers[item.name] = Container(item.path, of_dict, order)
            elif chosen and (item.name, item.offsets) in chosen:
                mine.append((order, item))
        # The smallest together: a rank that lacks some (counts of steps) reads whole chunks.
        least = _TOGETHER_BYTES
        mine.sort(key=lambda each: min(each[1].size_bytes, least))
        for order, (name, path, kind, offsets, sizes, shape, dtype) in mine:
            if kind == "value":
                self.values.append(self.items[order])
                self.value_entries.append((name, ValueEntry(path, of_values, 0, 0, order)))
            else:
                head, many, _, _, size = around = frame(dtype, sizes)
                data_at = at + len(head)
                if many and data_at % ITEM_BYTES[dtype]:
                    raise CheckpointUnsavable(
                        f"a {dtype} would lie at byte {data_at} of its file: set torch's "
                        "serialization.config.save.storage_alignment to a multiple of 16"
                    )
                extent = TensorExtent(file, at, size, data_at, begin + data_at, many)
                shard = Shard(offsets, sizes, file, data_at)
                if (whole := self.entries.get(name)) is None:
                    self.entries[name] = TensorEntry(path, dtype, shape, [shard], order)
                else:
                    whole.shards.append(shard)
                if 0 < many <= _SMALL_BYTES:
                    self.small.append(len(self.tensors))
                self.tensors.append(self.items[order])
                self.extents.append(extent)
                self._frames.append(around)
                at += -(-size // _ALIGNMENT) * _ALIGNMENT
                if at >= FILE_BYTES:
                    self.files.append((file, begin, page_up(at)))
                    begin, at, file = begin + page_up(at), 0, f"__{rank}_{len(self.files)}.distcp"
        if at:
            self.files.append((file, begin, page_up(at)))
            begin += page_up(at)
        self.size_bytes = begin
        # What reads a checkpoint by its entries, as an export, has the order of the state.
        self.entries = dict(sorted(self.entries.items(), key=lambda each: each[1].order))


def _key(value: Any) -> Any:
    """Equal for simple values, and tuples and lists of them, that are pickled alike; or `None`."""
    if type(value) in (tuple, list) and all(type(each) in _SIMPLE for each in value):
        return type(value), *map(_key, value)
    # Floats by `repr`, because 0.0 == -0.0 and nan != nan; long integers have none.
    known = type(value) in _SIMPLE
    return repr(value) if type(value) is float else (type(value), value) if known else None


def _pickle(item: Item, value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    file = io.BytesIO()
    try:
        torch.save(_without_rest(encode(value)), file)
    except Unsavable as e:
        raise CheckpointUnsavable(f"{item.name + e.where!r} cannot be saved: {e}") from e
    except Exception as e:
        kind = type(value).__name__
        raise CheckpointUnsavable(f"{item.name!r} ({kind}) cannot be saved: {e}") from e
    return file.getvalue()


def _without_rest(value: Any) -> Any:
    """The value with copies of the views of larger storages, which torch would save whole, unless
    several tensors share one.
    """
    views = [t for t in tree_leaves(value) if type(t) is torch.Tensor and not t.requires_grad]
    views = [t for t in views if t.layout is torch.strided and not t.is_nested]
    users = collections.Counter(t.untyped_storage().data_ptr() for t in views)
    larger = [t for t in views if t.untyped_storage().nbytes() > t.nbytes]
    copies = {id(t): t.clone() for t in larger if users[t.untyped_storage().data_ptr()] == 1}
    return tree_map(lambda each: copies.get(id(each), each), value) if copies else value


def check_not_freed(parts: Iterable[tuple[Item, torch.Tensor]]) -> None:
    """Names a tensor whose storage was freed: to copy it would end the process."""
    for item, tensor in parts:
        if type(tensor) is not torch.Tensor or (at := tensor.data_ptr()) >= _BEYOND_STORAGES:
            continue
        if tensor.nbytes and at == tensor.storage_offset() * tensor.itemsize:
            raise CheckpointUnsavable(f"{item.name!r} has no data: its storage was freed")


def local_part(leaf: Any, item: Item) -> torch.Tensor:
    """The data of this rank's part of a tensor, as described by `item`; a copy if its bytes in
    memory are those of the conjugate or of the negative.
    """
    return local_view(leaf, item).resolve_conj().resolve_neg()


def local_view(leaf: Any, item: Item) -> torch.Tensor:
    """This rank's part of a tensor, as described by `item`: never a copy."""
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
    if tuple(part.shape) != item.sizes:
        raise CheckpointError(
            f"{item.name!r} has shape {tuple(part.shape)} on this rank, {item.sizes} was planned"
        )
    return part
