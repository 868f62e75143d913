"""Remembers the parts of the last state dict: torch takes ten milliseconds to tell those of 400.

It lives as long as the process works in one folder: a training that is restarted in place has the
same parts again. But it may have come back as another rank, and the shard of a DTensor that a
process has depends on its place in the mesh, which a mesh that is equal to the last one need not
share. So what is remembered is of one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.async_checkpoint.state_dict.sharding import Item, describe, walk

__all__ = ["Described"]


class Described:
    """Calls `describe` only for a state dict that looks otherwise than the last one."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._last: tuple[tuple[int, ...], list[Any], list[Item]] | None = None

    def move(self, *place: int) -> None:
        """This process is there now: the ranks that tell its place among the others."""
        self._place = place

    def items(self, state_dict: Mapping[str, Any]) -> list[Item]:
        """The parts of `state_dict` that this rank has. See `describe`."""
        signature: list[Any] = []
        walk(state_dict, signature, [])
        last, place = self._last, self._place
        known = last is not None and last[0] == place and last[1] == signature
        items = last[2] if last is not None and known else describe(state_dict)
        # At once, so that no other thread sees the one without the other; and also what is known:
        # a mesh that is equal and of the past must not be kept.
        self._last = (place, signature, items)
        return list(items)
