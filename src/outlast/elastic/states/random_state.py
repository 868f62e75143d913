"""The random generators of every replica.

`sync` gathers the generators of all replicas; a load restores them by rank. In a job of another
size:

* a generator that had the same state on all of several replicas gets that state on all replicas, so
  that they keep drawing the same numbers;
* otherwise, replicas whose rank existed before continue with their own generators;
* new replicas are seeded with a hash of all saved generators and their rank.

So a checkpoint loaded by the same number of replicas always draws the same numbers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch

from outlast.async_checkpoint.named_files import checksum
from outlast.elastic.numerics.generators import Generators, capture, setter
from outlast.elastic.replicas import replica_group
from outlast.elastic.states.serialization import dump, parse
from outlast.elastic.states.state import PreparedState

_KIND = "random"


class RandomState(PreparedState):
    """The global generators of Python, NumPy (if it is imported), and torch on the CPU and on the
    GPUs that this process uses. For other generators, use `StateDictState`.

    Args:
        name: of the state.
    """

    def __init__(self, name: str = "random") -> None:
        super().__init__(name)
        self._gathered: list[str] | None = None

    def sync(self) -> None:
        def keep(parts: list[str]) -> None:
            self._gathered = parts

        job = replica_group.current().within()
        job.gather("the gathering of random generators", _packed(capture()), keep)

    def save(self, fileobj: BinaryIO) -> None:
        gathered = self._gathered or [_packed(capture())]
        self._gathered = None
        dump(_KIND, [_unpacked(text) for text in gathered], fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved: list[Generators] = parse(_KIND, fileobj)
        job = replica_group.current()
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


def _unpacked(text: str) -> Mapping[str, torch.Tensor]:
    found: Generators = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
