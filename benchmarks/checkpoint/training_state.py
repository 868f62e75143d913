"""The training job of the checkpoint benchmarks: a small transformer with Adam."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["FULL", "LARGE", "QUICK", "SHARE", "SMALL", "Size", "Training"]


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model: its width, layers and vocabulary, and the tokens of one batch."""

    dim: int
    layers: int
    vocabulary: int
    tokens: int


FULL = Size(768, 8, 13312, 64)
"""768 MiB with both moments, in about 300 tensors and 100 scalars."""
LARGE = Size(768, 11, 17920, 64)
"""1.1 GB: a large state in the paper of PCcheck."""
SHARE = Size(512, 4, 8192, 64)
"""192 MiB: the part of one rank of four, and the model of the training loop."""
SMALL = Size(192, 4, 2048, 16)
"""About 20 MiB, for 200 saves."""
QUICK = Size(64, 2, 256, 16)
"""For tests of the benchmarks only."""


class _Model(torch.nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size.vocabulary, size.dim)
        self.layers = torch.nn.Sequential(
            *(
                torch.nn.TransformerEncoderLayer(
                    size.dim, 8, 4 * size.dim, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(size.layers)
            )
        )
        self.norm = torch.nn.LayerNorm(size.dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.layers(self.embedding(tokens)))
        return hidden.square().mean()


class Training:
    """A training job that has made its first step, so that Adam has its moments.

    Args:
        size: the size of the model.
        mesh: if given, the state dict contains DTensors over it, as with FSDP2: each tensor is this
            rank's shard of one that is larger by the number of ranks.
    """

    def __init__(self, size: Size, mesh: Any = None) -> None:
        torch.manual_seed(0)
        self.model = _Model(size)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self._mesh = mesh
        self._batch = torch.randint(size.vocabulary, (2, size.tokens // 2))
        self.train()

    def train(self) -> None:
        """Makes one step."""
        self.pass_through()
        self.optimizer.step()

    def pass_through(self) -> None:
        """Runs a forward and a backward pass: a step without the optimizer's."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._batch).backward()

    def state_dict(self) -> dict[str, Any]:
        """The state, as a training job saves it."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self._mesh is None else _sharded(state, self._mesh)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that this rank saves."""
        found = [p.detach() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found.extend(state.values())
        return found

    @property
    def size_bytes(self) -> int:
        """The bytes of the state."""
        return sum(tensor.nbytes for tensor in self.tensors())


def _sharded(value: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(value, dict):
        return {key: _sharded(each, mesh) for key, each in value.items()}
    if isinstance(value, torch.Tensor) and value.dim():
        return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
    return value
