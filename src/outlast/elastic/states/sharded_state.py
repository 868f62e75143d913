"""A module and its optimizers whose tensors are sharded over the replicas (FSDP2, DTensor).

`sync` gathers them on rank 0, one tensor at a time, into host memory. A load shards them the way
the module is sharded at that time, over any number of replicas. The full state must fit into the
memory of one host; if it does not, use `outlast.Checkpointer`, where each rank writes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from outlast.elastic.states import replicas
from outlast.elastic.states.content import check_module, dump, parse
from outlast.elastic.states.state import PreparedState

_KIND = "sharded"


class ShardedState(PreparedState):
    """A module with sharded parameters, and its optimizers. The module may also be unsharded: a
    state saved with one layout can be loaded with any other.

    Args:
        module: on all replicas.
        optimizers: one or several, of the module's parameters.
        name: of the state.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        name: str = "sharded",
    ) -> None:
        super().__init__(name)
        self.module = module
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        self.optimizers = tuple(optimizers)
        self._gathered: dict[str, Any] | None = None

    def sync(self) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        self._gathered = {
            "module": get_model_state_dict(self.module, options=options),
            # An optimizer without a step has no state, but torch would fabricate one.
            "optimizers": [
                get_optimizer_state_dict(self.module, each, options=options) if each.state else {}
                for each in self.optimizers
            ],
        }

    def save(self, fileobj: BinaryIO) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise ValueError("a sharded state is gathered by sync: save it with sync=True")
        dump(_KIND, gathered, fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        job = replicas.current()
        # Rank 0 sends the tensors one by one; the others only need their names and shapes.
        saved = parse(_KIND, fileobj, "cpu" if job.rank == 0 or not job.several else "meta")
        check_module(get_model_state_dict(self.module), saved["module"])
        own, there = len(self.optimizers), len(saved["optimizers"])
        if own != there:
            raise ValueError(f"{own} optimizers, {there} were saved")
        return lambda: self._apply(saved, job.rank, job.several)

    def _apply(self, saved: dict[str, Any], rank: int, several: bool) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
        has = rank == 0 or not several
        set_model_state_dict(self.module, saved["module"] if has else {}, options=options)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            if state:
                given = state if has else {}
                set_optimizer_state_dict(self.module, optimizer, given, options=options)
