"""What must be the same on all ranks of a `Job` before it saves: a checkpoint contains one copy."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import first_rank
from outlast.elastic.job.models import parameters_of
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.tensors import digest
from outlast.elastic.wrapped_modules import plain_name
from outlast.events.hung_ranks import EQUAL_STEPS
from outlast.system.units import rank_names

log = logging.getLogger("outlast.elastic")

Described = list[tuple[str, tuple[int, ...]]]
"""The name and the shape of each parameter, in the order of the optimizer."""


def by_rank(values: Sequence[str]) -> str:
    """The values of the ranks, in their order, as a text."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{rank_names(found)}: {value}" for value, found in ranks.items())


def check_equal_models(module: nn.Module, ledger: CallLedger, group: Any) -> None:
    """Compares the tensors that several ranks hold under one name. Collective.

    Each rank writes a part of the checkpoint: it would be a mixture of models that were initialized
    differently. DDP gives all ranks the parameters of rank 0, but maybe after `Job.restore`.
    A `ValueError` on all ranks names one that differs, on a rank where it differs.
    """
    mine = {
        name: digest(tensor)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    }
    first = json.loads(ledger.agree("initial model", json.dumps(mine)))
    different = next((n for n, each in mine.items() if first.get(n, each) != each), None)
    rank = first_rank(different is not None, ledger.rank, group)
    if rank is None:
        return
    if different is not None:
        where = f"{different!r} has other values on rank {ledger.rank} than on another rank"
    else:
        where = f"rank {rank} names a tensor in its own error"
    raise ValueError(
        "the ranks have different models before the first step, but a checkpoint contains one copy "
        f"({where}). Wrap the model in DistributedDataParallel before job.restore(), which gives "
        "all ranks the parameters of rank 0, or seed all ranks equally before creating the model"
    )


def check_nothing_to_restore(checkpointer: Checkpointer, path: str, steps: int) -> None:
    """A `ValueError` on all ranks if nothing was restored and a later step has a checkpoint."""
    newest = max((info.step for info in checkpointer.checkpoints()), default=0)
    # One rank's answer holds for all: a save may already have begun when another rank looks.
    newest = int(checkpointer.ledger.agree("newest-unrestored", str(newest)))
    if newest > steps:
        raise ValueError(
            f"{path} has checkpoints up to step {newest}, and this job is at step {steps}, because "
            "restore() was not called: its saves would replace them. Call job.restore() before the "
            "first step. To start over, use another folder, or delete the checkpoints first "
            "(outlast checkpoint rm)"
        )


class SameParameters:
    """The check that each optimizer has the same parameters on all ranks that have one of its name,
    in the same order.

    An optimizer's state is saved by the numbers of its parameters. With pipeline stages, parameter
    0 of one stage would be saved as a copy of parameter 0 of another one, unless each stage has a
    name. A sharded parameter (DTensor) is the same on all ranks. FSDP1 does not say what is
    sharded.
    """

    def __init__(self, training: TrainingState, checked_by: Checkpointer) -> None:
        self._training = training
        self._module, self._optimizers = training.module, training.optimizers
        self._ranks, self._ledger = checked_by.ranks, checked_by.ledger
        self._epochs = training.epochs
        self._checked = self._has_compared = checked_by.world_size == 1

    def check(self) -> None:
        """Compares parameters in a round of its own, on all ranks, unless that was done."""
        if not self._checked:
            with self._ranks.operation():
                digests = self._ranks.exchange(self.digest())
            self.compared(digests if len(set(digests)) > 1 else ())

    def digest(self) -> str:
        """Of this rank's parameters, to be compared on all ranks; empty once they were."""
        if self._checked:
            return ""
        for name, module in self._module.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise ValueError(
                    f"{name or 'the model'} is a FullyShardedDataParallel module, whose optimizer "
                    "does not say which part of its state each rank has: use fully_shard (FSDP2)"
                )
        described = {n: _described(self._module, each) for n, each in self._optimizers.items()}
        hashed = {n: xxhash.xxh3_64_hexdigest(repr(each).encode()) for n, each in described.items()}
        return json.dumps(hashed, sort_keys=True)

    def compared(self, digests: Sequence[str]) -> None:
        """Takes those of all ranks, in rank order, if they differ: a `ValueError` says in what, if
        an optimizer of one name does.
        """
        self._checked, rank = True, self._ranks.rank
        if (name := name_that_differs(digests)) is not None:
            of_name = [json.loads(each).get(name, "") for each in digests]
            # One rank of each kind says what it has.
            speaks = of_name[rank] and rank == of_name.index(of_name[rank])
            described = _described(self._module, self._optimizers[name]) if speaks else None
            with self._ranks.operation():
                kinds = self._ranks.exchange(described)
            raise ValueError(difference(of_name, kinds))

    def compare_lengths(self) -> None:
        """At the first step: warns on a rank whose epoch has another number of batches than on the
        first rank here. A program may end its loop earlier, on all ranks. Waits for no rank.
        """
        if self._has_compared:
            return
        self._has_compared, length, rank = True, self._epochs.length, self._ledger.rank
        first, other = json.loads(self._ledger.agree("batches", json.dumps([length, rank])))
        if -1 not in (first, length) and first != length:
            log.warning(
                "rank %d has %d batches in this epoch, and rank %d has %d: if the loop does not "
                "end earlier, the job ends with an error there; %s",
                rank,
                length,
                other,
                first,
                EQUAL_STEPS,
            )


def name_that_differs(digests: Sequence[str]) -> str | None:
    """The name of an optimizer that has other parameters on one rank than on another."""
    known: dict[str, str] = {}
    found = (item for each in dict.fromkeys(digests) for item in json.loads(each or "{}").items())
    return next((name for name, each in found if known.setdefault(name, each) != each), None)


def _described(module: nn.Module, optimizer: Any) -> Described:
    names = {
        id(parameter): plain_name(name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return [
        (names.get(id(parameter), "a parameter outside of the model"), tuple(parameter.shape))
        for parameter in parameters_of(optimizer)
    ]


def difference(digests: Sequence[str], kinds: Sequence[Described | None]) -> str:
    """The error for ranks with these digests; `kinds` has the parameters of one rank of each."""
    first, other = [kind for kind in kinds if kind is not None][:2]
    number = next(
        (n for n, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(other)),
    )
    found = []
    for kind in (first, other):
        alike = [r for r, each in enumerate(digests) if each == digests[kinds.index(kind)]]
        found.append(f"{_parameter(kind, number)} on {rank_names(alike)}")
    return (
        "the optimizer has different parameters on different ranks, but its state is saved by "
        f"their numbers: parameter {number} is {found[0]}, and {found[1]}. Give pipeline stages "
        "names, model={'stage1': model}, or save them with a Checkpointer, by the names of the "
        "parameters: see docs/frameworks.md"
    )


def _parameter(described: Described, number: int) -> str:
    if number >= len(described):
        return "missing"
    name, shape = described[number]
    return f"{name!r} of shape {tuple(shape)}"
