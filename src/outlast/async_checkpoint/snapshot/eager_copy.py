"""Copies a snapshot at once, with several threads.

The training thread is one of them, and a restart in place may interrupt it anywhere. The other
threads must not keep copying into a buffer that the next save already uses. So the buffer is given
back only after `call_off`, which waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from outlast.async_checkpoint.snapshot.chunk_copy import Chunks
from outlast.async_checkpoint.snapshot.device_copy import CopyPair

_MOST_THREADS = 8  # fewer saturate the memory bandwidth of a host


class EagerCopy:
    """Fills chunks, with as many threads as torch uses, and keeps source and target tensors alive.

    Each thread takes the next chunk when it is done with one. torch's own copy cuts every tensor
    into equal parts and waits for the slowest one each time: if something else runs on one of the
    cores, such as the writer at the previous save, that takes many times as long.
    """

    def __init__(self, copies: Sequence[CopyPair], chunks: Chunks) -> None:
        self._copies = copies
        self._chunks = chunks
        # `next` on it is atomic: no two threads get the same number.
        self._left = iter(range(len(chunks)))
        self._called_off = False
        self._error: Exception | None = None
        count = min(torch.get_num_threads(), _MOST_THREADS, len(chunks)) - 1
        self._helpers = [_Helper(self._help) for _ in range(count)]

    def run(self) -> None:
        """Copies, and returns when all is copied."""
        for helper in self._helpers:
            helper.start()
        self._take()
        self._await_helpers()
        if self._error is not None:
            raise self._error

    def call_off(self) -> None:
        """Ends the copy: when this returns, nothing is being copied. Call it again if an interrupt
        has cut it short.
        """
        self._called_off = True
        self._await_helpers()

    def _await_helpers(self) -> None:
        for helper in self._helpers:
            if helper.ident is not None:  # else it never starts, or sees the call-off
                # Not `join`: after an interrupted `join`, a thread that is still copying counts as
                # dead (Python 3.11, bpo-45274).
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
