"""Processes that live long: one saves, another one restores, as a new process would."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_NET_S = 120.0
"""How long a batch may take, before it counts as a hang."""


class Died(Exception):
    """A process has ended, or does not answer."""


class Side:
    """A process with a function for each batch: `(number of cases tried, wrong texts by seed)`."""

    def __init__(self, rank: int = 0, world_size: int = 1, meeting: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, rank, world_size, meeting)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, what: str, folder: Path, cases: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send((what, folder, cases))

    def answer(self) -> Any:
        """What the process has found; `Died` if it ended, or hangs."""
        try:
            if self._pipe.poll(_NET_S):
                kind, found = self._pipe.recv()
                if kind == "error":
                    raise RuntimeError(found)
                return found
            why = f"does not answer for {_NET_S:g} s"
        except (EOFError, OSError):
            self._process.join(10)
            why = f"has ended with {self._process.exitcode}"
        self.end()
        raise Died(f"the process {why}")

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A folder in memory, where there is one: a disk would take most of the time."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="states-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: Connection, rank: int, world_size: int, meeting: str) -> None:
    import traceback

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(1000)
    import torch

    torch.set_num_threads(1)
    if world_size > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    from . import work

    while True:
        try:
            what, folder, cases = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("found", getattr(work, what)(folder, cases)))
        except Exception:  # noqa: BLE001 - told to the other process
            pipe.send(("error", traceback.format_exc()))
