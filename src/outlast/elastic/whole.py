"""States without tensors, as a `Job` saves and loads them: whole, as one value.

Taken apart, key by key, a state that holds other keys when it is loaded than when it was saved
would be a mixture of both: a history that has grown since would keep what is to be forgotten. A
state with tensors is taken apart all the same: these are large, may be sharded, and are loaded in
place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["opened", "packed", "room"]

_KEY = "(whole)"
# What is loaded again without running any code (`weights_only`). All else is taken apart.
_CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter)
_VALUES = (str, bytes, int, float, complex, bool, type(None))


def packed(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is saved of a state: in a tuple, which no checkpoint takes apart; or the state itself,
    if it has tensors or objects of a program's own.
    """
    return {_KEY: (state,)} if _is_simple(state) else state


def room(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state is loaded into.

    Args:
        state: as `packed` gave it, of now.
    """
    if _KEY in state:
        return {}  # filled with what was saved, whether that was whole or not
    return {**state, _KEY: None}  # of a time when it had no tensors yet


def opened(loaded: Mapping[str, Any]) -> Any:
    """The state that was loaded; `None` if there is none of it in the checkpoint."""
    whole = loaded.get(_KEY)
    if isinstance(whole, tuple):
        return whole[0]
    return {key: value for key, value in loaded.items() if key != _KEY} or None


def _is_simple(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(map(_is_simple, inner))
    return type(value) in _VALUES
