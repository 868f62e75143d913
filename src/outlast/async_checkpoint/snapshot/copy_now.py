"""Copies a snapshot at once, by several threads.

The thread that trains is one of them, and may be interrupted anywhere by a restart in place. The
others must not copy on into memory that has been given to the next save by then. So whoever takes
the memory back calls the copy off first, and that waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from outlast.async_checkpoint.snapshot.chunks import Chunks
from outlast.async_checkpoint.snapshot.copy_overlapped import CopyPair

__all__ = ["EagerCopy"]

_MOST_THREADS = 8  # the memory of one host is busy with fewer


class EagerCopy:
    """Fills chunks, by as many threads as torch uses.

    Each takes the next chunk when it is done with one. torch's own copy cuts every tensor in equal
    parts and waits for the slowest at each: where anything else runs on one of the processors, the
    writer of the save before say, that takes many times as long.

    Args:
        copies: what is copied, and to where; it stays in memory until this is gone.
        chunks: of the snapshot; they do it.
    """

    def __init__(self, copies: Sequence[CopyPair], chunks: Chunks) -> None:
        self._copies = copies
        self._chunks = chunks
        # The next of it is one step: no two threads get the same.
        self._left = iter(range(len(chunks)))
        self._called_off = False
        self._error: Exception | None = None
        count = min(torch.get_num_threads(), _MOST_THREADS, len(chunks)) - 1
        self._helpers = [_Helper(self._help) for _ in range(count)]

    def run(self) -> None:
        """Copies, and returns when that is done."""
        for helper in self._helpers:
            helper.start()
        self._take()
        self._await_helpers()
        if self._error is not None:
            raise self._error

    def call_off(self) -> None:
        """Nothing more is copied when this returns. It can be called again, and must be where an
        interrupt has cut it short.
        """
        self._called_off = True
        self._await_helpers()

    def _await_helpers(self) -> None:
        for helper in self._helpers:
            if helper.ident is not None:  # else it sees that it was called off, or never starts
                # Not `join`: an interrupted one has the thread count as dead while it still copies
                # (Python 3.11, bpo-45274).
                helper.ended.wait()

    def _take(self) -> None:
        for number in self._left:
            if self._called_off:
                return
            self._chunks.fill(number, lambda: self._called_off)

    def _help(self) -> None:
        try:
            self._take()
        except Exception as e:  # noqa: BLE001 - `run` raises it
            self._error = e


class _Helper(threading.Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="outlast-copy", daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()
