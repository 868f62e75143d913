"""States that may differ between ranks: `per_rank`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from outlast.elastic.job.encoding import unpack
from outlast.elastic.job.parts import ThirdPartyLoader, load_between_steps

log = logging.getLogger("outlast.elastic")


class PerRank:
    """What `per_rank` returns."""

    def __init__(self, source: Any) -> None:
        self.state_dict = source.state_dict
        self.load_state_dict = functools.partial(load_between_steps, source)


def per_rank(state: Any) -> PerRank:
    """An entry of `Job(states=...)` that may differ between ranks: each rank saves its own.

    In a job of another size, rank r gets what rank r had; a rank that did not exist then keeps the
    state that the object has; the states of ranks that are gone are not used. A process that stays
    over a restart in place keeps its own. A state that was saved as the same for all ranks is given
    to all of them.

    Args:
        state: a small object with `state_dict` and `load_state_dict`, which is copied after each
            step.

    Raises:
        TypeError: if it has no such methods, or is a module, an optimizer or a loader.
    """
    has_state = hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
    if not has_state or isinstance(state, nn.Module | Optimizer | DataLoader):
        raise TypeError(
            "per_rank() takes an object with state_dict and load_state_dict, which is no module, "
            f"optimizer or loader, not a {type(state).__name__}"
        )
    return PerRank(state)


class PerRankState(ThirdPartyLoader):
    """One such entry: a rank can do without it."""

    is_of_rank = False

    def __init__(self, source: PerRank, name: str, rank: int) -> None:
        super().__init__(source, rank, rank + 1, required=False)
        self._name, self.mergeable = name, True

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Loads this rank's state, or the one of all ranks."""
        own = state.get(str(self._rank))
        if isinstance(own, tuple) and own:
            self._source.load_state_dict(own[0])
        elif isinstance(state.get("0"), tuple):
            log.warning("no rank %d has saved states[%r]: it stays", self._rank, self._name)
        elif (shared := unpack(state)) is not None:
            self._source.load_state_dict(shared)

    def live(self, shared: Any, own: Mapping[int, Any], trusted: bool) -> dict[str, Any]:
        return super().live(shared, own, trusted) if own else {"0": ()}
