"""Routes each rank's output streams to files or the console, as given in torchrun's notation."""

from __future__ import annotations

import dataclasses
import enum


class Std(enum.IntFlag):
    """Standard streams of a process."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_std(text: str, nproc: int) -> dict[int, Std]:
    """Parse the streams of each local rank: `3` for all ranks, or `0:1,1:2` (others: none).

    Raises:
        ValueError: if `text` is neither, or names a local rank that does not exist.
    """
    text = text.removeprefix("=")  # argparse, and so torchrun, accepts `-r=3`
    if ":" not in text:
        return dict.fromkeys(range(nproc), _std(text, text))
    chosen = dict.fromkeys(range(nproc), Std.NONE)
    for item in text.split(","):
        rank, _, value = item.partition(":")
        if not rank.strip().isdecimal() or int(rank) >= nproc:
            raise ValueError(f"{text!r}: {rank!r} is not a local rank from 0 to {nproc - 1}")
        chosen[int(rank)] = _std(value, text)
    return chosen


def _std(value: str, text: str) -> Std:
    if value.strip() not in ("0", "1", "2", "3"):
        raise ValueError(
            f"{text!r}: {value!r} is not one of 0 (none), 1 (stdout), 2 (stderr), 3 (both)"
        )
    return Std(int(value))


@dataclasses.dataclass(frozen=True)
class Routes:
    """The destinations of each local rank's output.

    Attributes:
        redirects: streams that go to files only.
        tee: streams that go to files and to the console; takes precedence over `redirects`.
        shown: the local ranks that the console shows.
    """

    redirects: dict[int, Std]
    tee: dict[int, Std]
    shown: frozenset[int]

    @property
    def any_file(self) -> bool:
        """Whether any output goes to a file."""
        return any([*self.redirects.values(), *self.tee.values()])

    def to_file(self, local_rank: int, stream: Std) -> bool:
        """Whether this stream goes to a file."""
        return bool((self.redirects[local_rank] | self.tee[local_rank]) & stream)

    def to_console(self, local_rank: int, stream: Std) -> bool:
        """Whether this stream goes to the console."""
        hidden = self.redirects[local_rank] & ~self.tee[local_rank]
        return local_rank in self.shown and not hidden & stream
