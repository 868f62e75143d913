"""What states have saved, in memory, until a save in the background writes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import BinaryIO

from outlast.errors import CheckpointError
from outlast.system.error_text import describe

__all__ = ["Copy", "close_all"]


class Copy:
    """What a state has saved, in a file in memory: to fill that costs what a file on disk does
    before it is durable, and less than a buffer that grows.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("outlast-state", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def fill(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Saves it.

        Raises:
            CheckpointError: naming the state, if `write` raised.
        """
        try:
            with open(os.dup(self._descriptor), "w+b") as file:
                write(file)
        except Exception as e:
            raise CheckpointError(f"the state {name!r} could not be saved: {describe(e)}") from e

    def write(self, file: BinaryIO) -> None:
        """Writes it to a file on disk, once."""
        size, at = os.fstat(self._descriptor).st_size, 0
        file.flush()
        while at < size:
            at += os.sendfile(file.fileno(), self._descriptor, at, size - at)
        self.close()  # nobody needs the memory any more


def close_all(copies: Iterable[Copy]) -> None:
    """Whoever keeps an error keeps what its frames hold: that memory ends here."""
    for each in copies:
        each.close()
