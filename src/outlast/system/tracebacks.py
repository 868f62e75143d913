"""Tracebacks that must not keep objects alive: their frames hold all local variables."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes and contexts; each once, since `raise e from e` is a cycle."""
    met: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in met:
        met.add(id(seen))
        yield seen
        seen = seen.__cause__ or seen.__context__


def release_frames(error: BaseException) -> None:
    """Clears the local variables in the tracebacks of `error`: models, process groups and buffers,
    which the next iteration recreates.
    """
    for seen in chain(error):
        traceback.clear_frames(seen.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Removes the tracebacks of `error`. A frame that is still running cannot be cleared."""
    for seen in chain(error):
        seen.__traceback__ = None
