"""The layout of a rank's tensors in its files, which is also their layout in the snapshot buffer.

The files have the format of torch.distributed.checkpoint: one `torch.save` stream for each tensor,
one after another. The bytes around a tensor's data in its stream depend on its dtype and shape only
(`Frame`), and are written into the buffer once. A save then copies only the tensors' data, to the
offset that they have in the file.

The frames are made by torch: `torch.save` runs under `torch.serialization.skip_data` on a tensor
that is never filled, into a file object that records where torch skips. torch leaves the checksums
of a skipped record (the CRC-32 of zip) at zero, and `torch.load` does not check them; our checksums
are in the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.system.shared_memory import SharedMemory, page_up

_ALIGNMENT = 64  # of a tensor's stream; torch aligns the tensor's bytes in it the same way
# A file that has this size gets no more tensors, so that several files are written and read in
# parallel. A tensor is never split.
FILE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Frame:
    """The bytes that `torch.save` writes around the data of a tensor."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """The size of the whole stream."""
        return len(self.head) + self.data_bytes + len(self.tail)


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
    return Frame(bytes(recorder.parts[0]), recorder.skipped, bytes(recorder.parts[1]))


@dataclasses.dataclass(frozen=True)
class TensorExtent:
    """The place of a tensor: its stream and its data in the file, its data in the buffer."""

    file: str
    stream_at: int
    stream_bytes: int
    data_at: int
    data_bytes: int
    buffer_at: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of all tensors: `extents` in the order given to `lay_out`, and name, offset in the
    buffer and size of each file, in whole pages.
    """

    extents: list[TensorExtent]
    files: list[tuple[str, int, int]]
    size_bytes: int

    def inscribe(self, memory: SharedMemory, items: Sequence[Item]) -> None:
        """Writes the frames into the buffer; a save fills in the data."""
        for item, extent in zip(items, self.extents, strict=True):
            around = frame(item.dtype, item.sizes)
            begin = extent.buffer_at - len(around.head)
            memory.view[begin : extent.buffer_at] = around.head
            end = extent.buffer_at + extent.data_bytes
            memory.view[end : end + len(around.tail)] = around.tail


def lay_out(items: Sequence[Item], rank: int) -> Layout:
    """Lays tensors out in files of this rank. The same items give the same layout on any rank."""
    extents: list[TensorExtent] = []
    files: list[tuple[str, int, int]] = []
    begin, at = 0, 0  # offset of the current file in the buffer; offset in the file
    for item in items:
        around = frame(item.dtype, item.sizes)
        data_at = at + len(around.head)
        extents.append(
            TensorExtent(
                file=f"__{rank}_{len(files)}.distcp",
                stream_at=at,
                stream_bytes=around.size_bytes,
                data_at=data_at,
                data_bytes=around.data_bytes,
                buffer_at=begin + data_at,
            )
        )
        at += -(-around.size_bytes // _ALIGNMENT) * _ALIGNMENT
        if at >= FILE_BYTES:
            files.append((f"__{rank}_{len(files)}.distcp", begin, page_up(at)))
            begin, at = begin + page_up(at), 0
    if at:
        files.append((f"__{rank}_{len(files)}.distcp", begin, page_up(at)))
        begin += page_up(at)
    return Layout(extents, files, begin)
