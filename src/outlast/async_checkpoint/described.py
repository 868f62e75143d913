"""Remembers the parts of the last state dict: torch takes ten milliseconds to tell those of 400.

What it remembers is of one rank: the shard of a DTensor that this process has depends on its place
in the mesh, which a mesh that is equal to it need not share. So it lives as long as a checkpointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.async_checkpoint.plan import Item, describe, walk

__all__ = ["Described"]


class Described:
    """Calls `describe` only for a state dict that looks otherwise than the last one."""

    def __init__(self) -> None:
        self._last: tuple[list[Any], list[Item]] | None = None

    def items(self, state_dict: Mapping[str, Any]) -> list[Item]:
        """The parts of `state_dict` that this rank has. See `describe`."""
        signature: list[Any] = []
        walk(state_dict, signature, [])
        last = self._last
        if last is None or last[0] != signature:
            # At once, so that no other thread sees the one without the other.
            self._last = last = (signature, describe(state_dict))
        return list(last[1])
