"""Saves a third-party data loader, such as torchdata's `StatefulDataLoader`, in a `Job`.

The loader defines the structure of its state: keys may differ between ranks, and between the middle
of an epoch and its start. So each rank's state is saved as one value, and restored to that rank.
At another world size only the loader itself can interpret the states (torchdata's count what one
rank has consumed), so they are refused: samples would be repeated and skipped. A loader whose
state is a global position declares this with a true attribute `resizable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.errors import CheckpointMismatch


def is_third_party(source: Any, *, is_loader: bool = False) -> bool:
    """Whether the state of `source` is saved rank by rank. If `is_loader`, `source` is known to be
    a data loader, regardless of its class.
    """
    own = isinstance(source, ElasticLoader | ShardedStream)
    return isinstance(source, DataLoader) or (is_loader and source is not None and not own)


class ThirdPartyLoader:
    """Saves and loads the state of one loader; if `required`, a checkpoint without this state is an
    error.
    """

    def __init__(self, source: Any, rank: int, world_size: int, *, required: bool) -> None:
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._required = required

    def save(self) -> dict[str, Any]:
        """This rank's state, keyed by rank, as a tuple, which a checkpoint stores as one value."""
        return {str(self._rank): (self._source.state_dict(),)}

    def load_target(self, saved: Any) -> dict[str, Any]:
        """The target of a load, which fills it with the states of all ranks."""
        return {}

    def load(self, states: Mapping[str, Any], *, started: bool) -> None:
        """Loads this rank's state from those of all ranks. If training had not `started`, that is,
        the checkpoint was made before the first step, no position in the data can be lost.

        Raises:
            ValueError: if a required state is missing.
            CheckpointMismatch: if it was saved at another world size, and the loader is not
                resizable.
        """
        if not states and not self._required:
            return
        kind = type(self._source).__name__
        own = states.get(str(self._rank), states.get("0"))
        if not isinstance(own, tuple):
            raise ValueError(f"the checkpoint has no state of a {kind}")
        resized = len(states) != self._world_size
        if resized and started and not getattr(self._source, "resizable", False):
            raise CheckpointMismatch(
                f"the {kind} was saved by {len(states)} ranks, each with its own position, and "
                f"there are {self._world_size} now: some samples would be repeated and others "
                f"skipped. Continue with {len(states)} ranks, or use outlast.elastic.ElasticLoader "
                f"or ShardedStream, which support any number (or set {kind}.resizable if it does)"
            )
        self._source.load_state_dict(own[0])
