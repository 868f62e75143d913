"""The random generators on which the order of a loader may depend, as they were when a pass began:
the global ones of the process, and those that the loader was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outlast.elastic import random_generators as generators
from outlast.elastic.job.encoding import packed, unpacked
from outlast.elastic.job.sampled_order import NOTE as ORDER

Noted = dict[str, tuple[str, bytes]]
"""The states of generators, by name: the type of their elements, and these."""

OWN = "own"  # the names of generators that the loader was given: own0, own1, ...


def note(own: Sequence[torch.Generator]) -> Noted:
    """The present states of the global generators, and of a loader's own."""
    noted = {name: packed(state) for name, state in generators.capture().items()}
    return {name: (dtype, content) for name, (dtype, _, content) in noted.items()} | states_of(own)


def states_of(own: Sequence[torch.Generator]) -> Noted:
    """Those of a loader's own generators, by their numbers."""
    noted = {f"{OWN}{i}": packed(each.get_state()) for i, each in enumerate(own)}
    return {name: (dtype, content) for name, (dtype, _, content) in noted.items()}


def set_noted(noted: Mapping[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Sets the generators to noted states, or to captured ones."""
    for name, value in noted.items():
        if name == ORDER:
            continue
        state = value if isinstance(value, torch.Tensor) else unpacked((value[0], [-1], value[1]))
        if not name.startswith(OWN):
            generators.setter(name, state)()
        elif int(name.removeprefix(OWN)) < len(own):
            own[int(name.removeprefix(OWN))].set_state(state)
