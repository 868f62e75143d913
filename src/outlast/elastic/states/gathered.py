"""Ready-made states that all replicas gather before a save: random generators, sharded modules."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import torch
from torch import nn

from outlast.async_checkpoint.inspection import checksum
from outlast.elastic.random_generators import Generators, capture, setter
from outlast.elastic.states import replicas
from outlast.elastic.states.ready_made import check_module, dump, parse
from outlast.elastic.states.state import PreparedState

__all__ = ["RandomState", "ShardedState"]

_RANDOM = "random"
_SHARDED = "sharded"


class RandomState(PreparedState):
    """The global generators of every replica: those of Python, NumPy (if it is imported), and torch
    on the CPU and on the GPUs that the process uses. For others, use `StateDictState`.

    A load restores them by rank, so the same number of replicas always draws the same numbers. In a
    job of another size:

    * a generator that had the same state on all of several replicas gets that state on all
      replicas, so that they keep drawing the same numbers;
    * otherwise, replicas whose rank existed before continue with their own generators;
    * new replicas are seeded with a hash of all saved generators and their rank.
    """

    def __init__(self, name: str = "random") -> None:
        super().__init__(name)
        self._gathered: list[str] | None = None

    def sync(self) -> None:
        def keep(parts: list[str]) -> None:
            self._gathered = parts

        job = replicas.current().within()
        job.gather("the gathering of random generators", _packed(capture()), keep)

    def save(self, fileobj: BinaryIO) -> None:
        gathered = self._gathered or [_packed(capture())]
        self._gathered = None
        files = [io.BytesIO(base64.b64decode(text)) for text in gathered]
        dump(_RANDOM, [torch.load(each, weights_only=True) for each in files], fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved: list[Generators] = parse(_RANDOM, fileobj)
        job = replicas.current()
        mine = _share(saved, job.rank, job.world_size)
        setters = [setter(name, value) for name, value in mine.items()]

        def apply() -> None:
            for set_generator in setters:
                set_generator()

        return apply


def _share(saved: list[Generators], rank: int, world_size: int) -> dict[str, torch.Tensor | int]:
    """For each generator, its state on `rank`, or a number to seed it with."""
    if len(saved) == world_size:
        return dict(saved[rank])
    mine: dict[str, torch.Tensor | int] = {}
    for name in saved[0]:
        states = [generators[name] for generators in saved if name in generators]
        alike = len(states) > 1 and all(torch.equal(states[0], other) for other in states[1:])
        if alike:
            mine[name] = states[0]
        elif rank < len(states):
            mine[name] = states[rank]
        else:
            data = b"".join(state.numpy().tobytes() for state in states)
            mine[name] = int(checksum(data + f"{name}/{rank}".encode()), 16)
    return mine


def _packed(generators: Generators) -> str:
    memory = io.BytesIO()
    torch.save(generators, memory)
    return base64.b64encode(memory.getvalue()).decode()


class ShardedState(PreparedState):
    """A module and its optimizers whose tensors are sharded over the replicas (FSDP2, DTensor). The
    module may also be unsharded: a state saved with one layout can be loaded with any other.

    `sync` gathers the tensors on rank 0, one at a time, into host memory. A load shards them the
    way the module is sharded at that time, over any number of replicas. The full state must fit
    into the memory of one host; if it does not, use `outlast.Checkpointer`, where each rank writes
    its part.

    Args:
        module: on all replicas.
        optimizers: one or several, of the module's parameters.
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
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

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
        dump(_SHARDED, gathered, fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        job = replicas.current()
        # Rank 0 sends the tensors one by one; the others only need their names and shapes.
        saved = parse(_SHARDED, fileobj, "cpu" if job.rank == 0 or not job.several else "meta")
        check_module(get_model_state_dict(self.module), saved["module"])
        own, there = len(self.optimizers), len(saved["optimizers"])
        if own != there:
            raise ValueError(f"{own} optimizers, {there} were saved")
        return lambda: self._apply(saved, job.rank, job.several)

    def _apply(self, saved: dict[str, Any], rank: int, several: bool) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
        has = rank == 0 or not several
        set_model_state_dict(self.module, saved["module"] if has else {}, options=options)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            if state:
                given = state if has else {}
                set_optimizer_state_dict(self.module, optimizer, given, options=options)
