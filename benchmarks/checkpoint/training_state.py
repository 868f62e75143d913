"""What the checkpoint benchmarks save: a small transformer with Adam, of the size asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["FULL", "QUICK", "SHARE", "SMALL", "Job", "Size"]


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model: its width, its layers, its vocabulary, and the tokens of one batch."""

    dim: int
    layers: int
    vocabulary: int
    tokens: int


FULL = Size(768, 8, 13312, 64)
"""768 MiB with both moments, in some 300 tensors and 100 single numbers."""
SHARE = Size(512, 4, 8192, 64)
"""192 MiB: what one rank of four has, and what the training loop trains."""
SMALL = Size(192, 4, 2048, 16)
"""About 20 MiB, for 200 saves."""
QUICK = Size(64, 2, 256, 16)
"""Not to be measured: to see that it works."""


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


class Job:
    """A training that can be stepped. After the first step, Adam has its moments.

    Args:
        size: of the model.
        mesh: shards of it are what the state dict then has: each tensor is this rank's part of one
            that is as many times as long as there are ranks, as FSDP2 has them.
    """

    def __init__(self, size: Size, mesh: Any = None) -> None:
        torch.manual_seed(0)
        self.model = _Model(size)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self._mesh = mesh
        self._batch = torch.randint(size.vocabulary, (2, size.tokens // 2))
        self.train()

    def train(self) -> None:
        """One step."""
        self.pass_through()
        self.optimizer.step()

    def pass_through(self) -> None:
        """A forward and a backward pass: what a step does before the optimizer's."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._batch).backward()

    def state_dict(self) -> dict[str, Any]:
        """As the training would save it."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self._mesh is None else _sharded(state, self._mesh)

    def tensors(self) -> list[torch.Tensor]:
        """All that is saved of this rank."""
        found = [p.detach() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found.extend(state.values())
        return found

    @property
    def size_bytes(self) -> int:
        """Of the state."""
        return sum(tensor.nbytes for tensor in self.tensors())


def _sharded(value: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(value, dict):
        return {key: _sharded(each, mesh) for key, each in value.items()}
    if isinstance(value, torch.Tensor) and value.dim():
        return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
    return value
