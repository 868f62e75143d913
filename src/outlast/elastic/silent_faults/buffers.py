"""The buffers of a module that must be equal on all replicas: those that nothing has written to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.elastic.silent_faults.digests import Digest, SideStream, cpu_digest
from outlast.elastic.silent_faults.layout import Part, Piece

_MOST_PIECES = 64  # of a record: with more buffers, several have one digest


class Buffers:
    """The buffers of a module, with their write counters of when this was created."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions = {
            name: (id(each), each._version)
            for name, each in module.named_buffers()
            if not each.is_inference()
            and not isinstance(each, DTensor)
            and each.layout == torch.strided
            and each.numel()
        }
        names = list(self._versions)
        size = -(-len(names) // _MOST_PIECES) or 1
        self._groups = [names[at : at + size] for at in range(0, len(names), size)]

    def unwritten(self) -> set[str]:
        """The labels of the pieces of which no buffer was written to or replaced."""
        return set(self._pieces("cpu")[0]) | set(self._pieces("cuda")[0])

    def later(self) -> tuple[dict[str, Digest], Callable[[], None]]:
        """The digests by label, and what makes them: to be called in the background."""
        pieces, tensors = self._pieces("cpu")
        made: dict[str, str] = {}

        def make() -> None:
            made.update((label, cpu_digest(piece, tensors)) for label, piece in pieces.items())

        return {label: partial(made.__getitem__, label) for label in pieces}, make

    def start(self, stream: SideStream) -> dict[str, Digest]:
        """The digests by label, which are made on a GPU."""
        pieces, tensors = self._pieces("cuda")
        if not pieces:
            return {}
        return dict(zip(pieces, stream.start(list(pieces.values()), tensors), strict=True))

    def _pieces(self, device: str) -> tuple[dict[str, Piece], list[torch.Tensor]]:
        """The pieces by label, and the tensors that they refer to. They are the same in every
        cycle, except for those that are left out.
        """
        now = {
            name: each.detach()
            for name, each in self._module.named_buffers()
            if name in self._versions
            and self._versions[name] == (id(each), each._version)
            and each.device.type == device
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
