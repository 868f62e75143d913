"""The random generators of every replica.

Each replica's generators are gathered by `sync` and given back by rank. In a job of another size:

* a generator that stood the same on several replicas, and on all of them, stands so again on all,
  so that what they drew alike they go on to draw alike;
* otherwise the replicas that were there before go on with their own;
* those that were not are seeded with a hash of all saved generators and their rank.

So the same checkpoint loaded by the same number of replicas draws the same numbers, always.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch

from outlast.async_checkpoint.files import checksum
from outlast.elastic.numerics.generators import Generators, capture, setter
from outlast.elastic.replicas import replica_group
from outlast.elastic.states.serialization import dump, parse
from outlast.elastic.states.state import State

__all__ = ["RandomState"]

_KIND = "random"


class RandomState(State):
    """The generators of Python, of NumPy (if it is imported), of torch on the CPU and on the GPUs
    that this process uses. Of each the global one; a generator of your own is a `StateDictState`.

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

    def load(self, fileobj: BinaryIO) -> None:
        self.prepare(fileobj)()

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved: list[Generators] = parse(_KIND, fileobj)
        job = replica_group.current()
        mine = _share(saved, job.rank, job.world_size)
        setters = [setter(name, value) for name, value in mine.items()]

        def apply() -> None:
            for set_one in setters:
                set_one()

        return apply


def _share(saved: list[Generators], rank: int, world_size: int) -> dict[str, torch.Tensor | int]:
    """For each generator, what it is to be on `rank`: a state, or a number to seed it with."""
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
