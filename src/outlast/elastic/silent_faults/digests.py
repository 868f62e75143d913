"""The digests of pieces of parameters: xxh3 in CPU memory, column sums of integers on a GPU.

Two ranks compare digests that were made in the same way. On a GPU, the bytes are summed as columns
of 64-bit integers: integer addition gives the same result in any order, and a change of one word
changes its column. Only errors that cancel in a column stay unseen. The sums are computed on a
stream of their own, and only they are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from outlast.elastic.silent_faults.layout import Part, Piece, local_tensor

Digest = Callable[[], str]
"""Returns the digest, as 16 hexadecimal digits; waits for it if needed."""

_CHUNK_BYTES = 1 << 20  # the GIL is free while a chunk is hashed
_COLUMNS = 1024


def cpu_digest(piece: Piece, tensors: Sequence[torch.Tensor]) -> str:
    """Hashes the pieces' bytes in memory; `tensors` are those of the layout."""
    digest = xxhash.xxh3_64()
    for part in piece.parts:
        content = _bytes_of(tensors[part.parameter], part).numpy().data
        for begin in range(0, len(content), _CHUNK_BYTES):
            digest.update(content[begin : begin + _CHUNK_BYTES])
    return digest.hexdigest()


class SideStream:
    """Starts digests on a GPU: the kernels of training and of the digests run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._done: Any = None

    def start(self, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """Enqueues the digests, after what training has enqueued so far. Does not synchronize."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            sums = [
                [_column_sums(_bytes_of(tensors[p.parameter], p)) for p in piece.parts]
                for piece in pieces
            ]
            results = [
                torch.cat(each).to("cpu", non_blocking=True) if each else torch.empty(0)
                for each in sums
            ]
            done = torch.cuda.Event()
            done.record(self._stream)
        self._done = done

        def digest(result: torch.Tensor) -> str:
            done.synchronize()
            return xxhash.xxh3_64_hexdigest(result.numpy().data)

        return [lambda result=result: digest(result) for result in results]  # type: ignore[misc]

    def hold_training(self) -> None:
        """Makes the training stream wait until the started digests have read their bytes."""
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)


def _column_sums(content: torch.Tensor) -> torch.Tensor:
    """The sums of the columns of a table of 32-bit integers with 1024 columns."""
    width = 4 * _COLUMNS
    whole = content.numel() // width * width
    rest = torch.nn.functional.pad(content[whole:], (0, width - (content.numel() - whole)))
    total = rest.view(torch.int32).to(torch.int64)
    if whole:
        table = content[:whole].view(torch.int32).view(-1, _COLUMNS)
        total = total + table.sum(0, dtype=torch.int64)
    return total


def _bytes_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor's elements, in the order in which they lie in memory, as bytes."""
    return flat_bytes(tensor)[part.begin : part.end]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: those in memory if its elements lie together, in any order of the
    dimensions (`torch.channels_last`); else those of a copy.
    """
    tensor = local_tensor(tensor)
    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor.contiguous().view(-1).view(torch.uint8)
