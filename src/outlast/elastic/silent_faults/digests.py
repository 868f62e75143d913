"""The digests of parameters and buffers: xxh3 in CPU memory, column sums on an accelerator.

Two ranks compare digests that were made in the same way. On a device, the bytes are summed as
columns of 64-bit integers: integer addition gives the same result in any order, and a change of one
word changes its column. Only errors that cancel in a column stay unseen. The sums are computed on a
stream of their own, and only they are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.subclasses import wraps
from outlast.elastic.silent_faults.layout import Part, Piece
from outlast.elastic.tensors import column_sums, local, memory_of
from outlast.system.streams import (
    Event,
    current_stream,
    make_follow,
    make_wait,
    on_stream,
    recorded,
    side_stream,
    to_host,
)

Digest = Callable[[], str]
"""Returns the digest, as 16 hexadecimal digits; waits for it if needed."""

_CHUNK_BYTES = 1 << 20  # the GIL is free while a chunk is hashed
_MOST_BUFFER_DIGESTS = 64  # of a record: with more buffers, several have one digest


def cpu_digest(piece: Piece, tensors: Sequence[torch.Tensor]) -> str:
    """Hashes the pieces' bytes in memory; `tensors` are those of the layout."""
    digest = xxhash.xxh3_64()
    for part in piece.parts:
        held = _bytes_of(tensors[part.parameter], part)
        content = memory_of(held)
        for begin in range(0, len(content), _CHUNK_BYTES):
            digest.update(content[begin : begin + _CHUNK_BYTES])
    return digest.hexdigest()


class SideStreams:
    """Starts digests on devices: the kernels of training and of the digests run side by side."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: side_stream(device) for device in devices}
        self._done: list[tuple[torch.device, Event]] = []
        self._read: list[torch.Tensor] = []

    def __contains__(self, device: torch.device) -> bool:
        return device in self._streams

    def start(self, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> list[Digest]:
        """Enqueues the digests, after what training has enqueued so far. Does not synchronize.

        The parts of one piece may be on several devices. Each is summed on the stream of its own
        device: on the stream of another one, nothing would order it with what is read from it.
        Parts in CPU memory are summed at once.
        """
        sums: dict[Part, torch.Tensor] = {}
        parts = [part for piece in pieces for part in piece.parts]
        for device, stream in self._streams.items():
            own = [part for part in parts if tensors[part.parameter].device == device]
            if not own:
                continue
            make_follow(stream, current_stream(device))
            with on_stream(stream), torch.no_grad():
                sums.update(_sums(own, tensors))
                self._done.append((device, recorded(stream)))
            # Freed before training waits, the memory could be used again while it is read. So a
            # parameter may get new memory, by `parameter.data = ...`, which torch does not count.
            self._read += [tensors[part.parameter] for part in own]
        with torch.no_grad():
            sums.update(_sums([part for part in parts if part not in sums], tensors))
        started = [done for _, done in self._done]

        def digest(piece: Piece) -> str:
            for done in started:
                done.synchronize()
            return xxhash.xxh3_64_hexdigest(b"".join(sums[p].numpy().data for p in piece.parts))

        return [partial(digest, piece) for piece in pieces]

    def hold_training(self) -> None:
        """Makes the training streams wait until the started digests have read their bytes."""
        for device, done in self._done:
            make_wait(current_stream(device), done)
        self._done, self._read = [], []


def _sums(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> dict[Part, torch.Tensor]:
    """The column sums of parts on one device, on their way to the CPU in one copy."""
    if not parts:
        return {}
    sums = torch.stack([column_sums(_bytes_of(tensors[p.parameter], p)) for p in parts])
    return dict(zip(parts, to_host(sums), strict=True))


def _bytes_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor's elements, in the order in which they lie in memory, as bytes."""
    return flat_bytes(tensor)[part.begin : part.end]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: in memory if its elements lie together, in any order; else a copy's."""
    tensor = local(tensor).resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor.contiguous().view(-1).view(torch.uint8)


class Buffers:
    """The buffers of a module that nothing has written to since then: equal on all replicas."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions = {
            name: (id(each), each._version)
            for name, each in module.named_buffers()
            if not each.is_inference()
            and not (isinstance(each, DTensor) or wraps(each))
            and each.layout == torch.strided
            and each.numel()
        }
        names = list(self._versions)
        size = -(-len(names) // _MOST_BUFFER_DIGESTS) or 1
        self._groups = [names[at : at + size] for at in range(0, len(names), size)]

    def unwritten(self) -> set[str]:
        """The labels of the pieces of which no buffer was written to or replaced."""
        return set(self._pieces()[0])

    def later(self) -> tuple[dict[str, Digest], Callable[[], None]]:
        """The digests by label, and what makes them: to be called in the background."""
        pieces, tensors = self._pieces(lambda device: device.type == "cpu")
        made: dict[str, str] = {}

        def make() -> None:
            made.update((label, cpu_digest(piece, tensors)) for label, piece in pieces.items())

        return {label: partial(made.__getitem__, label) for label in pieces}, make

    def start(self, streams: SideStreams) -> dict[str, Digest]:
        """The digests by label, which are made on devices."""
        pieces, tensors = self._pieces(lambda device: device in streams)
        return dict(zip(pieces, streams.start(list(pieces.values()), tensors), strict=True))

    def _pieces(
        self, is_wanted: Callable[[torch.device], bool] = lambda _: True
    ) -> tuple[dict[str, Piece], list[torch.Tensor]]:
        """The pieces by label, and their tensors: always the same, except for what is left out."""
        now = {
            name: each.detach()
            for name, each in self._module.named_buffers()
            if name in self._versions
            and self._versions[name] == (id(each), each._version)
            and is_wanted(each.device)
        }
        pieces: dict[str, Piece] = {}
        tensors: list[torch.Tensor] = []
        for names in self._groups:
            if not all(name in now for name in names):
                continue
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            first = len(tensors)
            tensors += [now[name] for name in names]
            parts = tuple(Part(i, 0, tensors[i].nbytes) for i in range(first, len(tensors)))
            pieces[label] = Piece(label, parts)
        return pieces, tensors
