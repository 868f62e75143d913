"""Log files as a part of the state: after a restore, a file ends where it did at the restored step.

Its length is noted after each step, once the rows are in the kernel: a killed process loses none.
Before a rank reports its part of a checkpoint, its files are durable: its host may lose power.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from outlast.elastic.job.parts import Part
from outlast.system.files import fsync_folder, lock_open_file

log = logging.getLogger("outlast.elastic")

Mark = tuple[int, str]
"""The length of a file, and a digest of its last bytes, by which it is known again."""


class TextFile(io.TextIOWrapper):
    """A text file in mode "a+", whose lines are in the kernel once they are written. On a rank that
    does not write it, what it is given is discarded.
    """

    def __init__(self, path: str, encoding: str, *, writes: bool) -> None:
        file: Any = open(os.devnull, "a+b")  # noqa: SIM115 - it is that of this object
        super().__init__(file, encoding=encoding, newline="", line_buffering=True)
        self.path, self.writes, self.is_ready = path, writes, False
        self.calls = 0  # of `write`
        self._mark, self._durable = (0, ""), (-1, "")
        self._closing = threading.Lock()

    def write(self, text: str, /) -> int:
        """Appends `text`. A `ValueError` before `Job.restore`, or if the file is closed."""
        if not self.is_ready:
            raise ValueError(f"{self.path}: call job.restore() first, which sets where it ends")
        self.calls += 1
        return super().write(text)

    def begin(self, mark: Mark | None, *, is_restored: bool) -> None:
        size = self._open() if self.writes else 0
        if size and not is_restored:
            number = 1
            while os.path.lexists(moved := f"{self.path}.{number}"):
                number += 1
            os.rename(self.path, moved)
            self._open()
            log.warning("%s is of an earlier run: it is kept as %s", self.path, moved)
        elif size and mark is None:
            log.warning("%s is not in the restored state: rows follow its end", self.path)
        elif mark is not None and size < mark[0]:
            had = f"it has {size} bytes, and had {mark[0]} at the restored step"
            text = "%s was removed or cut off: %s. Rows are missing, and new ones follow its end"
            log.warning(text, self.path, had)
        elif mark is not None:
            os.ftruncate(self.fileno(), mark[0])
        self.seek(0, os.SEEK_END)
        self.is_ready = True

    def _open(self) -> int:
        """Opens and locks the file, in the place of what was open. Returns its size."""
        with open(self.path, "ab+") as file:
            os.dup2(file.fileno(), self.fileno(), inheritable=False)
        if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            raise ValueError(f"{self.path!r} is no regular file, so it has no end to go back to")
        try:
            is_locked = lock_open_file(self.fileno())
        except OSError as e:  # a file system without locks
            log.debug("no lock on %s: %s", self.path, e)
        else:
            if not is_locked:
                raise ValueError(f"{self.path!r} is a text file of a job in another process")
        return os.fstat(self.fileno()).st_size

    def mark(self) -> Mark:
        """The present end. What was written is in the kernel."""
        if not self.closed:
            self.flush()
            size = os.fstat(self.fileno()).st_size
            if size != self._mark[0]:
                self._mark = size, _tail(self.fileno(), size)
        return self._mark

    def sync(self) -> None:
        """Makes what was noted durable. Any thread may call this."""
        with self._closing:
            mark = self._mark
            if self.writes and self.is_ready and not self.closed and mark != self._durable:
                os.fsync(self.fileno())
                fsync_folder(os.path.dirname(os.path.abspath(self.path)))
                self._durable = mark

    def close(self) -> None:
        try:
            if not self.closed:
                self.mark()
                self.sync()
        finally:
            with self._closing:
                super().close()


# By its real path, each file of this process, and whether its job is still at work.
_files: dict[str, tuple[TextFile, Callable[[], bool]]] = {}


class TextFiles(Part):
    """The files of one job on one rank, by the paths that the program has given."""

    in_place = False

    def __init__(self, rank: int) -> None:
        self._rank, self._began = rank, False
        self._files: dict[str, TextFile] = {}
        self._marks: dict[str, Mark] = {}
        self._late: bool | None = None  # whether rows were written after the early note of a step

    def add(
        self, path: str, encoding: str, in_use: Callable[[], bool], *, each_rank: bool
    ) -> TextFile:
        """See `Job.text_file`. `in_use` tells whether the job is still at work."""
        before, is_used = _files.get(place := os.path.realpath(path), (None, in_use))
        if self._began:
            raise ValueError(f"call job.text_file({path!r}) before job.restore()")
        if before is not None and is_used():
            raise ValueError(f"{path!r} is a text file of this job already, or of another one")
        if before is not None:
            before.close()  # of a job that was left without its `with` block
        file = TextFile(path, encoding, writes=each_rank or self._rank == 0)
        # Of a job of another size, only the process that has written the file knows its end.
        self.needs_own |= each_rank or (file.writes and not (before and before.writes))
        self._files[path], _files[place] = file, (file, in_use)
        return file

    def begin(self, *, is_restored: bool) -> None:
        """All ranks have restored the state, or there is none."""
        for path, file in self._files.items():
            mark = self._marks.get(path) if is_restored and file.writes else None
            file.begin(mark, is_restored=is_restored)
        self._began = True

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def completed(self, early: Any, own: Any) -> None:
        """A step is complete: compares what was noted in it early, if it was, with what is now."""
        if early is not None:
            self._late = bool(self._late) or early != own

    @property
    def may_follow(self) -> bool:
        """Whether rows may follow in a step after this rank has noted its state early. No other
        rank can know: rows are often written by `if rank == 0`.
        """
        return self._late is not False and any(file.writes for file in self._files.values())

    def save(self) -> dict[str, Any]:
        # Also of files that are not open yet: saves are prepared before `begin`, and a save that a
        # fault has cut off is completed only if the state has the same parts.
        marks = {
            path: list(file.mark() if file.is_ready else self._marks.get(path, (0, "")))
            for path, file in self._files.items()
            if file.writes
        }
        return {str(self._rank): (marks,)} if marks else {}

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Nothing is cut off before all ranks have loaded their states: see `begin`."""
        (self._marks,) = state.get(str(self._rank), ({},))
        for path, file in self._files.items():
            if file.writes and path in self._marks and os.path.exists(path):
                size, tail = self._marks[path]
                with open(path, "rb") as present:
                    if os.path.getsize(path) >= size and _tail(present.fileno(), size) != tail:
                        raise ValueError(
                            f"{path} is not the file of step {steps}: it has other bytes before "
                            f"{size}, its length then. Put that back, or move this one away"
                        )

    def own(self) -> dict[str, Any] | None:
        """Of a file that another rank writes, how often this rank was given a text."""
        return {p: f.mark() if f.writes else f.calls for p, f in self._files.items()} or None

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        written = {
            str(rank): {p: list(mark) for p, mark in each.items() if not isinstance(mark, int)}
            for rank, each in own.items()
        }
        return {rank: (each,) for rank, each in written.items() if each}


def _tail(number: int, end: int) -> str:
    size = min(end, 64)
    return xxhash.xxh3_64_hexdigest(os.pread(number, size, end - size)) if end else ""
