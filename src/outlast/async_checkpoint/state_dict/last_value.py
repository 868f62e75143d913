"""Remembers the most recently computed value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Last(Generic[V]):
    """Remembers the value of the last key. Another key replaces it: nothing else invalidates it."""

    def __init__(self) -> None:
        self._entry: tuple[Any, V] | None = None

    def of(self, key: Any, make: Callable[[], V]) -> V:
        """The value of `key`, made by `make` unless the last key was equal."""
        entry = self._entry
        value = entry[1] if entry is not None and entry[0] == key else make()
        # In one step, so another thread never sees a key without its value; and the newer of two
        # equal keys, so the mesh of a destroyed process group is not kept alive.
        self._entry = key, value
        return value
