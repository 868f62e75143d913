"""Notes the state of the random generators after every step, at little cost.

Most programs draw from one generator only, or from none: a state that has not changed is not
converted again.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import torch

from outlast.elastic.numerics import generators
from outlast.elastic.numerics.generators import Generators

_TWISTER_BYTES = 2500  # of NumPy's Mersenne Twister: 624 words and the position

Noted = dict[str, Any]


class GeneratorStates:
    """The states of the process's generators, as values that can be compared and pickled."""

    def __init__(self) -> None:
        self._python: tuple[Any, ...] = ()
        self._python_noted: tuple[Any, ...] = ()
        self._numpy: tuple[Any, ...] | None = None
        self._twister = b""

    def note(self) -> Noted:
        """The present states."""
        python = random.getstate()
        if python != self._python:
            version, numbers, gauss = self._python = python
            self._python_noted = version, array.array("Q", numbers).tobytes(), gauss
        noted: Noted = {
            "python": self._python_noted,
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if "numpy" in sys.modules:
            noted["numpy"] = self._of_numpy(sys.modules["numpy"])
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states = generators.capture()
            noted.update({k: v.numpy().tobytes() for k, v in states.items() if "cuda" in k})
        return noted

    def _of_numpy(self, numpy: Any) -> tuple[Any, ...] | None:
        """The state of NumPy's generator; `None` if it is not a Mersenne Twister.

        `get_state` takes ten times as long as all else here. Its result is the same as before if
        the words and the position are the same, unless it holds the second of two normal numbers,
        which may have been drawn since.
        """
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return None
        twister = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        known = self._numpy
        if known is None or known[3] or twister != self._twister:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            self._numpy = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
            self._twister = twister
        return self._numpy


def restored(noted: Noted) -> Generators:
    """What `note` has noted, in the form of `generators.capture`."""
    found: Generators = {}
    for name, state in noted.items():
        if name == "python":
            version, numbers, gauss = state
            words = torch.frombuffer(bytearray(numbers), dtype=torch.int64)
            found[name] = generators.of_python((version, words.tolist(), gauss))
        elif name != "numpy":
            found[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        elif state is not None:
            kind, keys, *rest = state
            words = torch.frombuffer(bytearray(keys), dtype=torch.int32).to(torch.int64)
            found[name] = generators.of_numpy((kind, (words & 0xFFFFFFFF).tolist(), *rest))
    return found
