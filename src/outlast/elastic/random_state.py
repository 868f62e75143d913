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
import logging
import random
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch

from outlast.async_checkpoint.manifest import checksum
from outlast.elastic import replicas
from outlast.elastic.content import dump, parse
from outlast.elastic.state import State

__all__ = ["RandomState"]

log = logging.getLogger("outlast.elastic")

_KIND = "random"
Generators = dict[str, torch.Tensor]


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

        job = replicas.current().within()
        job.gather("the gathering of random generators", _packed(_capture()), keep)

    def save(self, fileobj: BinaryIO) -> None:
        gathered = self._gathered or [_packed(_capture())]
        self._gathered = None
        dump(_KIND, [_unpacked(text) for text in gathered], fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self.prepare(fileobj)()

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved: list[Generators] = parse(_KIND, fileobj)
        job = replicas.current()
        mine = _share(saved, job.rank, job.world_size)
        setters = [_setter(name, value) for name, value in mine.items()]

        def apply() -> None:
            for setter in setters:
                setter()

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


# -------------------------------------------------------------------------------- the generators


def _capture() -> Generators:
    """All generators as tensors: nothing of them is pickled."""
    version, numbers, gauss = random.getstate()
    states = {
        "python": _integers([version, *numbers, *_float(gauss)]),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        if kind == "MT19937":
            values = [*map(int, keys), int(position), *_float(cached if has_gauss else None)]
            states["numpy"] = _integers(values)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        current = torch.cuda.current_device()
        for device in range(torch.cuda.device_count()):
            name = "cuda" if device == current else f"cuda:{device}"
            states[name] = torch.cuda.get_rng_state(device)
    return states


def _setter(name: str, value: torch.Tensor | int) -> Callable[[], object]:
    """What sets a generator; the value was checked."""
    if name == "python":
        if isinstance(value, int):
            return lambda: random.seed(value)
        version, *numbers, has_gauss, gauss = value.tolist()
        state = (version, tuple(numbers), _gauss(has_gauss, gauss))
        random.Random().setstate(state)
        return lambda: random.setstate(state)
    if name == "numpy":
        return _numpy_setter(value)
    if name == "torch":
        if isinstance(value, int):
            return lambda: torch.default_generator.manual_seed(value % (1 << 63))
        torch.Generator().set_state(value)
        return lambda: torch.set_rng_state(value)
    return _cuda_setter(name, value)


def _numpy_setter(value: torch.Tensor | int) -> Callable[[], object]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return lambda: None
    if isinstance(value, int):
        return lambda: numpy.random.seed(value % (1 << 32))
    *keys, position, has_gauss, gauss = value.tolist()
    cached = _gauss(has_gauss, gauss)
    state = ("MT19937", keys, position, int(cached is not None), cached or 0.0)
    numpy.random.RandomState().set_state(state)
    return lambda: numpy.random.set_state(state)


def _cuda_setter(name: str, value: torch.Tensor | int) -> Callable[[], object]:
    """`cuda` is the device that the process uses most; others go by their number."""
    if not torch.cuda.is_available():
        log.info("the generator %s is left out: there is no GPU here", name)
        return lambda: None

    def apply() -> None:
        current = torch.cuda.current_device()
        device = int(name.partition(":")[2] or current)
        if device >= torch.cuda.device_count() or (name != "cuda" and device == current):
            return
        if isinstance(value, int):
            torch.cuda.default_generators[device].manual_seed(value % (1 << 63))
        else:
            torch.cuda.set_rng_state(value, device)

    return apply


def _integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _float(value: float | None) -> list[int]:
    """A number that may not be there, as two integers."""
    if value is None:
        return [0, 0]
    return [1, int(torch.tensor(value, dtype=torch.float64).view(torch.int64))]


def _gauss(has: int, bits: int) -> float | None:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64)) if has else None


def _packed(generators: Generators) -> str:
    memory = io.BytesIO()
    torch.save(generators, memory)
    return base64.b64encode(memory.getvalue()).decode()


def _unpacked(text: str) -> Mapping[str, torch.Tensor]:
    found: Generators = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
