"""`Checkpointer` of two ranks with gloo, each a process; `python -m` this is one of them."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random

import torch.distributed as dist

from outlast.async_checkpoint import Checkpointer

from ..calls import Calls
from .checkpointer import NET, CheckpointerSubject, note_committed, state_of

_ELEMENTS = 4096


class TwoRanks(CheckpointerSubject):
    """Saves three times, a new step or the same one; a restore has one rank."""

    def __init__(self, random: Random) -> None:
        every = random.choice((1, 3))
        super().__init__(
            "two-ranks",
            elements=_ELEMENTS,
            keep=random.choice((None, 1)),
            step_of=lambda save: save // every + 1,
            first=random.choice((0, 1)),
        )
        self._every = every

    def run(self, folder: Path, calls: Calls) -> None:
        """See `CheckpointerSubject`. Here each rank notes what it was told."""
        arguments = [str(folder), str(self._first), str(self._options["keep"] or 0)]
        with tempfile.TemporaryDirectory(prefix="torture-") as elsewhere:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", __name__, *arguments, str(self._every)],
                    env={
                        **os.environ,
                        "RANK": str(rank),
                        "WORLD_SIZE": "2",
                        "TORTURE_STORE": f"file://{elsewhere}/store",
                    },
                )
                for rank in range(2)
            ]
            try:
                codes = [rank.wait(3 * NET.total_seconds()) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        assert codes == [0, 0], f"the ranks have ended with {codes}"


def main() -> None:
    """One rank."""
    folder, first, keep, every = sys.argv[1], *map(int, sys.argv[2:])
    calls = Calls.attached()
    dist.init_process_group(
        "gloo",
        init_method=os.environ["TORTURE_STORE"],
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        with Checkpointer(folder, keep=keep or None, threads=1) as checkpointer:
            for save in range(first + 1, first + 4):
                calls.note(f"begun {save}")
                handle = checkpointer.save(save // every + 1, state_of(save, _ELEMENTS))
                handle.add_done_callback(partial(note_committed, calls, save))
                handle.wait(NET)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
