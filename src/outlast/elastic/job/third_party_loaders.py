"""Loaders that are not ours (torchdata's `StatefulDataLoader`), as a `Job` saves and loads them.

Their states are theirs: they may hold other keys in the middle of an epoch than at its beginning,
and differ from rank to rank. So each rank's is saved whole, as one value, and every rank gets its
own back. At another size nobody but the loader could say what they mean (torchdata's count what
their own rank has had), so they are refused: samples would be repeated and left out. A loader whose
state is a place in the whole says so, by an attribute `resizable` that is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.errors import CheckpointError

__all__ = ["is_foreign", "load", "saved"]


def is_foreign(source: Any, *, loads_data: bool = False) -> bool:
    """Whether the state of `source` is to be saved so.

    Args:
        source: what has `state_dict` and `load_state_dict`.
        loads_data: whether it is known to be a loader.
    """
    ours = isinstance(source, ElasticLoader | ShardedStream)
    return isinstance(source, DataLoader) or (loads_data and source is not None and not ours)


def saved(source: Any, rank: int) -> dict[str, Any]:
    """What is saved of it on this rank: in a tuple, which no checkpoint takes apart."""
    return {str(rank): (source.state_dict(),)}


def load(
    source: Any, states: Mapping[str, Any], rank: int, world_size: int, *, begun: bool
) -> None:
    """Loads this rank's state.

    Args:
        source: whose state it is.
        states: what `saved` gave, of all ranks that there were.
        rank, world_size: of this one, as they are now.
        begun: whether anything had been trained on; if not, no place in the data is lost.

    Raises:
        ValueError: if there is none.
        CheckpointError: if it is of another size, and only means something there.
    """
    kind = type(source).__name__
    mine = states.get(str(rank), states.get("0"))
    if not isinstance(mine, tuple):
        raise ValueError(f"the checkpoint has no state of a {kind}")
    resized = len(states) != world_size
    if resized and begun and not getattr(source, "resizable", False):
        raise CheckpointError(
            f"the {kind} was saved by {len(states)} ranks, each with a place of its own, and there "
            f"are {world_size} now: it would repeat some samples and leave out others. Go on with "
            f"{len(states)} ranks, or use outlast.elastic.ElasticLoader or ShardedStream, which "
            f"take any number (or set {kind}.resizable, if it does)"
        )
    source.load_state_dict(mine[0])
