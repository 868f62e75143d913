"""Checks that the optimizer of a `Job` has the same parameters on all ranks, in the same order.

An optimizer's state is saved by the numbers of its parameters, and a checkpoint contains one copy
of each number. With pipeline stages, parameter 0 of one stage would be saved as a copy of parameter
0 of another one, without an error if the shapes are equal. A sharded parameter (DTensor) is the
same on all ranks: its shape is that of the whole. FSDP1 does not say what is sharded: the state of
one rank's part would be saved as that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from outlast.async_checkpoint.kept_state import KeptState
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_name

Described = list[tuple[str, tuple[int, ...]]]
"""The name and the shape of each parameter, in the order of the optimizer."""


class SameParameters:
    """The check of one `Job`, made once: it costs nothing in the steps."""

    def __init__(self, training: TrainingState, ledger: CallLedger, kept: KeptState) -> None:
        self._module, self._optimizer = training.module, training.optimizer
        self._ranks = Agreement(ledger.child("parameters"), kept.timeout_s, kept.url)
        self._checked = ledger.world_size == 1

    def check(self) -> None:
        """Compares the ranks' parameters at the first call. Call it on all ranks.

        Raises:
            ValueError: on all ranks, if they differ; names the ranks, and the first parameter that
                differs. If the model is sharded by FSDP1.
        """
        if self._checked:
            return
        with self._ranks.operation():
            self._compare()
        self._checked = True

    def _compare(self) -> None:
        for name, module in self._module.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise ValueError(
                    f"{name or 'the model'} is a FullyShardedDataParallel module, whose optimizer "
                    "does not say which part of its state each rank has: use fully_shard (FSDP2)"
                )
        described = _described(self._module, self._optimizer)
        digests = self._ranks.exchange(xxhash.xxh3_64_hexdigest(repr(described).encode()))
        if len(set(digests)) > 1:
            # One rank of each kind says what it has.
            speaks = self._ranks.rank == digests.index(digests[self._ranks.rank])
            kinds = self._ranks.exchange(described if speaks else None)
            raise ValueError(_difference(digests, kinds))


def _described(module: nn.Module, optimizer: Any) -> Described:
    names = {
        id(parameter): plain_name(name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return [
        (names.get(id(parameter), "a parameter outside of the model"), tuple(parameter.shape))
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    ]


def _difference(digests: Sequence[str], kinds: Sequence[Described | None]) -> str:
    """The error for ranks whose parameters have these digests."""
    first, other = [kind for kind in kinds if kind is not None][:2]
    number = next(
        (n for n, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(other)),
    )
    said = [
        f"{_parameter(kind, number)} on {_ranks(digests, kinds.index(kind))}"
        for kind in (first, other)
    ]
    return (
        "the optimizer has different parameters on different ranks, but its state is saved by "
        f"their numbers: parameter {number} is {said[0]}, and {said[1]}. Save pipeline stages with "
        "a Checkpointer, by the names of the parameters: see docs/frameworks.md"
    )


def _parameter(described: Described, number: int) -> str:
    if number >= len(described):
        return "missing"
    name, shape = described[number]
    return f"{name!r} of shape {tuple(shape)}"


def _ranks(digests: Sequence[str], rank: int) -> str:
    """All ranks with the parameters of `rank`."""
    alike = [str(r) for r, digest in enumerate(digests) if digest == digests[rank]]
    shown = ", ".join(alike[:8]) + (f" and {len(alike) - 8} more" if len(alike) > 8 else "")
    return f"rank{'s' * (len(alike) > 1)} {shown}"
