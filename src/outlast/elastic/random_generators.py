"""The states of a process's random generators (Python, NumPy, torch), for adapters."""

from __future__ import annotations

from outlast.elastic.numerics.generators import Generators, capture, setter

__all__ = ["Generators", "capture", "set_all"]


def set_all(states: Generators) -> None:
    """Sets the generators to states that `capture` has returned.

    Raises:
        Exception: a generator's own, if its state is invalid: none is changed then.
    """
    for set_generator in [setter(name, state) for name, state in states.items()]:
        set_generator()
