"""The global random generators of a process: their states, and seeds for the workers of a loader.

These are the generators of Python, of NumPy (if it is imported), and of torch on the CPU and on the
devices that this process uses. Their states are tensors; nothing is pickled.
"""

from __future__ import annotations

import array
import ctypes
import functools
import logging
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

from outlast.system import devices

log = logging.getLogger("outlast.elastic")

Generators = dict[str, torch.Tensor]

_MASK = (1 << 64) - 1
_memory = ctypes.string_at  # quicker than by a NumPy array
_TWISTER_BYTES = 2500  # of a Mersenne Twister of Python or NumPy: 624 words and the position


def capture() -> Generators:
    """The state of each generator, by name."""
    states = {"python": of_python(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        if state[0] == "MT19937":
            states["numpy"] = of_numpy(state)
    return states | of_devices()


def of_devices() -> Generators:
    """The state of the generator of each accelerator, if this process uses them."""
    accelerator = devices.in_use()
    if accelerator is None or not accelerator.has_generators:
        return {}
    states, current = {}, torch.accelerator.current_device_index()
    for index in range(torch.accelerator.device_count()):
        name = accelerator.type if index == current else f"{accelerator.type}:{index}"
        states[name] = accelerator.random_state(index)
    return states


def of_python(state: tuple[Any, ...]) -> torch.Tensor:
    """The result of `random.getstate()`, as a tensor."""
    version, numbers, gauss = state
    return _numbers([version, *numbers, *_float(gauss)])


def of_numpy(state: tuple[Any, ...]) -> torch.Tensor:
    """The result of `numpy.random.get_state()` of a Mersenne Twister, as a tensor."""
    _, keys, position, has_gauss, cached = state
    return _numbers([*keys.tolist(), int(position), *_float(cached if has_gauss else None)])


def _numbers(values: list[int]) -> torch.Tensor:
    return torch.frombuffer(array.array("q", values), dtype=torch.int64)  # quicker than `tensor`


def setter(name: str, value: torch.Tensor | int) -> Callable[[], object]:
    """Checks a generator's state or integer seed, raising its own error; returns what sets it."""
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
    return _device_setter(name, value)


def set_all(states: Generators) -> None:
    """Sets the generators to states that `capture` has returned; as `setter`, none if one fails."""
    for set_generator in [setter(name, state) for name, state in states.items()]:
        set_generator()


class Notes:
    """Notes the states of the generators as plain values, after every step: mostly by a copy of
    their memory, as what the generators return as their state has hundreds of Python numbers.
    """

    def __init__(self) -> None:
        self._numpy: tuple[Any, ...] | None = None
        self._twister = b""
        # In memory, the position and the words follow the head of the object: seen here, not known.
        self._reads_python = False
        returned = self._of_python()
        if hasattr(random.getstate, "__self__"):  # a program may have replaced it
            self._reads_python = True
            self._reads_python = self._of_python() == returned

    def take(self) -> dict[str, Any]:
        """The present states, to compare and to pickle."""
        tensors = {"torch": torch.get_rng_state(), **of_devices()}
        noted: dict[str, Any] = {n: _memory(t.data_ptr(), t.nbytes) for n, t in tensors.items()}
        if "numpy" in sys.modules:
            noted["numpy"] = self._of_numpy(sys.modules["numpy"])
        noted["python"] = self._of_python()
        return noted

    def _of_python(self) -> tuple[Any, ...]:
        if self._reads_python:
            generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
            at = id(generator) + object.__basicsize__
            return generator.VERSION, _memory(at, _TWISTER_BYTES), generator.gauss_next
        version, (*words, position), gauss = random.getstate()
        return version, array.array("I", [position, *words]).tobytes(), gauss

    def _of_numpy(self, numpy: Any) -> tuple[Any, ...] | None:
        """`None` if it is not a Mersenne Twister. `get_state`, which is slow, is not called if the
        words and the position are as before, unless it holds the second of two normal numbers.
        """
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return None
        twister = _memory(generator.ctypes.state_address, _TWISTER_BYTES)
        if self._numpy is None or self._numpy[3] or twister != self._twister:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            self._numpy = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
            self._twister = twister
        return self._numpy


def of_note(noted: Mapping[str, Any]) -> Generators:
    """The states of which `Notes.take` has returned this."""
    found: Generators = {}
    for name, state in noted.items():
        if name == "python":
            position, *words = array.array("I", state[1])
            found[name] = of_python((state[0], (*words, position), state[2]))
        elif name != "numpy":
            found[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        elif state is not None:
            kind, keys, *rest = state
            found[name] = of_numpy((kind, array.array("I", keys), *rest))
    return found


@functools.cache
def _checking(numpy: Any) -> Any:
    """A generator to try a state on: to make one takes longer than all else in a restore of it."""
    return numpy.random.RandomState()


def _numpy_setter(value: torch.Tensor | int) -> Callable[[], object]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return lambda: None
    if isinstance(value, int):
        return lambda: numpy.random.seed(value % (1 << 32))
    *keys, position, has_gauss, gauss = value.tolist()
    cached = _gauss(has_gauss, gauss)
    state = ("MT19937", keys, position, int(cached is not None), cached or 0.0)
    _checking(numpy).set_state(state)
    return lambda: numpy.random.set_state(state)


def _device_setter(name: str, value: torch.Tensor | int) -> Callable[[], object]:
    """A type, such as `cuda`, is the current device; others have their number in the name."""
    type, _, number = name.partition(":")
    accelerator = devices.available()
    if accelerator is None or accelerator.type != type or not accelerator.has_generators:
        log.info("the state of generator %s is skipped: there is no such generator here", name)
        return lambda: None

    def apply() -> None:
        current = torch.accelerator.current_device_index()
        index = int(number or current)
        if index >= torch.accelerator.device_count() or (number and index == current):
            return
        if isinstance(value, int):
            accelerator.set_random_state(index, accelerator.seeded(index, value % (1 << 63)))
        else:
            accelerator.set_random_state(index, value)

    return apply


def _float(value: float | None) -> list[int]:
    """An optional number, as two integers."""
    if value is None:
        return [0, 0]
    return [1, int(torch.tensor(value, dtype=torch.float64).view(torch.int64))]


def _gauss(has: int, bits: int) -> float | None:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64)) if has else None


def mix64(value: int) -> int:
    """A 64-bit hash of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def has_worker_processes(options: Mapping[str, Any]) -> bool:
    """Whether a `DataLoader` with these options, or attributes, loads in other processes."""
    method = options.get("worker_method", "multiprocessing")
    return bool(options.get("num_workers")) and method == "multiprocessing"


def start_workers(loader: Any) -> None:
    """Starts persistent workers that do not run yet, without a change of the generators: they draw
    their seeds in the first epoch of a process, which may not be that of the training.
    """
    if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is None:
        before = capture()
        iter(loader)
        set_all(before)


class Seeded:
    """The indices of a batch, or of a sample, on their way to a worker process of a `DataLoader`,
    with the seed of the generators that load them: it is set when they arrive.

    torch seeds a worker when an iteration begins. What the worker draws for a batch then depends on
    the batches that it has loaded before: a job that continues within an epoch would draw others.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrived, (self._indices, self._seed)


def _arrived(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:  # the generators that torch seeds, too
        random.seed(seed)
        torch.manual_seed(mix64(seed + 1) >> 1)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(mix64(seed + 2) >> 32)
    return indices
