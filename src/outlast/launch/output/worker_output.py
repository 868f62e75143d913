"""The workers' output: lines with the rank before them, on the console and in files.

The launcher must never wait for whoever reads its own output: a pager that stands still would
keep it from seeing a worker die. So it writes only what a descriptor takes without waiting, and
when much has piled up it stops *reading* from the workers, who then wait as they would have
without a launcher. Whatever bytes workers write, the console gets whole lines of valid UTF-8;
files get the bytes as they are.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import selectors
from collections.abc import Callable
from typing import BinaryIO

from outlast.launch.event_loop import Loop

__all__ = ["KEPT_LINES", "Capture", "Lines", "Outlet", "readable"]

KEPT_LINES = 40
"""How many of a worker's last lines are kept for the story at the end."""
LINE_LIMIT = 64 * 1024
"""A longer line is shown in pieces: a worker that never ends its line must not fill the memory."""
PENDING_LIMIT = 1024 * 1024
"""With this many bytes unwritten, no more are read from workers."""
CHUNK = 64 * 1024
DRAIN_READS = 16
"""A pipe holds one or two chunks; the bound is for a child that writes as fast as is read."""


class Lines:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_LIMIT:
            whole.append(self._partial[:LINE_LIMIT])
            self._partial = self._partial[LINE_LIMIT:]
        return whole

    def rest(self) -> list[bytes]:
        """The last line, if it has no end."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


def readable(line: bytes) -> str:
    """A line as text: as a terminal would show it, with what is not UTF-8 spelled out.

    Of a progress bar, which returns to the start of its line again and again, the last state is
    left.
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")


class Outlet:
    """Writes to a descriptor that may be slow, without ever waiting for it."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._buffer = bytearray()
        self._watched = False
        self._gone = False
        self._when_room: list[Callable[[], None]] = []
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        """Whether so much is unwritten that no more should be asked for."""
        return len(self._buffer) >= PENDING_LIMIT

    @property
    def pending(self) -> bool:
        """Whether anything is unwritten."""
        return bool(self._buffer)

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call once when it is no longer full."""
        self._when_room.append(callback)

    def write(self, data: bytes) -> None:
        """Write now or later; after the reader has gone, never."""
        if not self._gone:
            self._buffer += data
            self._flush()

    def drop(self) -> None:
        """Forget what is unwritten, and all that will be."""
        self._gone = True
        self._buffer.clear()
        self._flush()

    def _flush(self) -> None:
        # A pipe that is ready takes PIPE_BUF bytes without waiting; of more it may take a part
        # and wait. It is not set to non-blocking, because that would hold for the shell too.
        while self._buffer and self._poll.poll(0):
            try:
                written = os.write(self._fd, self._buffer[: select.PIPE_BUF])
            except BlockingIOError:
                break  # somebody else made it non-blocking
            except OSError:
                self._gone = True  # nobody reads any more (EPIPE, EIO): the job goes on
                self._buffer.clear()
            else:
                del self._buffer[:written]
        if bool(self._buffer) != self._watched:
            self._watched = not self._watched
            if self._watched:
                self._loop.watch(self._fd, selectors.EVENT_WRITE, self._flush)
            else:
                self._loop.unwatch(self._fd)
        if not self.full:
            waiting, self._when_room = self._when_room, []
            for callback in waiting:
                callback()


class Capture:
    """One output stream of one worker.

    Args:
        loop: where its pipe is watched.
        fd: the reading end of the pipe; closed by `close`.
        prefix: what stands before each line on the console.
        outlet: the console, or `None` to show nothing.
        file: gets the bytes as they are; closed with the stream.
    """

    def __init__(
        self, loop: Loop, fd: int, prefix: bytes, outlet: Outlet | None, file: BinaryIO | None
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._prefix = prefix
        self._outlet = outlet
        self._file = file
        self._lines = Lines()
        self._open = True
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        os.set_blocking(fd, False)
        self._loop.watch(fd, selectors.EVENT_READ, self._on_readable)

    def drain(self) -> None:
        """Take what is in the pipe now, and its last line even without an end.

        For a worker that has ended. The pipe may stay open in the hands of its children, and what
        they write is still shown.
        """
        for _ in range(DRAIN_READS):
            if not self._open or not self._read():
                break
        self._show(self._lines.rest())

    def close(self) -> None:
        """Take what is there, and give back the pipe and the file."""
        self.drain()
        self._shut()

    def _on_readable(self) -> None:
        self._read()
        if self._open and self._outlet is not None and self._outlet.full:
            self._loop.unwatch(self._fd)
            self._outlet.when_room(self._resume)

    def _resume(self) -> None:
        if self._open:
            self._loop.watch(self._fd, selectors.EVENT_READ, self._on_readable)

    def _read(self) -> bool:
        """Whether there may be more to read now."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._show(self._lines.rest())
            self._shut()
            return False
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the job
                self._file.write(data)
        self._show(self._lines.feed(data))
        return True

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        texts = [readable(line) for line in lines]
        self.last.extend(texts)
        if self._outlet is not None:
            self._outlet.write(b"".join(self._prefix + text.encode() + b"\n" for text in texts))

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.unwatch(self._fd)
        os.close(self._fd)
        if self._file is not None:
            self._file.close()
