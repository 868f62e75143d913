"""The environment variables of this package."""

from __future__ import annotations

import os


def set_rank(rank: int | None, world_size: int | None) -> None:
    """Sets `RANK` and `WORLD_SIZE`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
