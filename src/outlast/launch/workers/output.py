"""The output of the workers: lines with a rank prefix on the console, and bytes in files.

The launcher must never wait for the reader of its own output: a paused pager would keep it from
noticing a worker's death. So it writes only as much as a descriptor takes without waiting. When too
much is unwritten, it stops *reading* from the workers, which then wait as they would without a
launcher. Regardless of the bytes that workers write, the console gets complete lines of valid
UTF-8; files get the bytes unchanged.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import selectors
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

from outlast.launch.event_loop import EventLoop

# The 8 colors of every terminal, except black and white (backgrounds) and red (a failed job).
_COLORS = ("cyan", "green", "yellow", "blue", "magenta")
_OWN, _FAILED = "bold", "bold red"

KEPT_LINES = 40
"""The number of a worker's last lines to keep for the summary of the job."""
LINE_LIMIT = 64 * 1024
"""Longer lines are shown in pieces: a worker that never ends a line must not exhaust memory."""
PENDING_LIMIT = 1024 * 1024
"""With this many bytes unwritten, reading from the workers stops."""
CHUNK = 64 * 1024
DRAIN_READS = 16
"""A pipe holds one or two chunks; the bound is for a child that writes as fast as it is read."""


def say_early(line: str) -> None:
    """Print a line of the launcher while it has no `Console`, and no workers that would wait."""
    sys.stderr.write(f"[outlast] {time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


class Lines:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_LIMIT:
            lines.append(self._partial[:LINE_LIMIT])
            self._partial = self._partial[LINE_LIMIT:]
        return lines

    def rest(self) -> list[bytes]:
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


def readable(line: bytes) -> str:
    """A line as a terminal would show it, with bytes that are not UTF-8 escaped.

    For a progress bar, which rewrites its line, only the last state is kept.
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")


class Outlet:
    """Writes to a descriptor that may be slow, without waiting for it."""

    def __init__(self, loop: EventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._buffer = bytearray()
        self._watched = False
        self._closed = False
        self._when_room: list[Callable[[], None]] = []
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        return len(self._buffer) >= PENDING_LIMIT

    @property
    def pending(self) -> bool:
        return bool(self._buffer)

    def when_room(self, callback: Callable[[], None]) -> None:
        self._when_room.append(callback)

    def write(self, data: bytes) -> None:
        """Write now or later; data is dropped once the reader has closed."""
        if not self._closed:
            self._buffer += data
            self._flush()

    def drop(self) -> None:
        self._closed = True
        self._buffer.clear()
        self._flush()

    def _flush(self) -> None:
        # A pipe that is ready takes PIPE_BUF bytes without blocking; more could block after a part.
        # It is not set to non-blocking, because that would also affect the shell.
        while self._buffer and self._poll.poll(0):
            try:
                written = os.write(self._fd, self._buffer[: select.PIPE_BUF])
            except BlockingIOError:
                break  # another process made it non-blocking
            except OSError:
                self._closed = True  # the reader is gone (EPIPE, EIO); the job continues
                self._buffer.clear()
            else:
                del self._buffer[:written]
        if self._buffer and not self._watched:
            self._loop.watch(self._fd, selectors.EVENT_WRITE, self._flush)
        elif self._watched and not self._buffer:
            self._loop.unwatch(self._fd)
        self._watched = bool(self._buffer)
        if not self.full:
            waiting, self._when_room = self._when_room, []
            for callback in waiting:
                callback()


class Capture:
    """One output stream of one worker.

    Args:
        fd: the reading end of the pipe; closed by `close`.
        prefix: the prefix of each line on the console.
        outlet: the console, or `None` to show nothing.
        file: gets the bytes unchanged; closed with the stream.
    """

    def __init__(
        self, loop: EventLoop, fd: int, prefix: bytes, outlet: Outlet | None, file: BinaryIO | None
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
        """Read the pipe's contents, including a last line that has no newline: for a worker that
        has ended. Its children may keep the pipe open; their output is still shown.
        """
        for _ in range(DRAIN_READS):
            if not self._open or not self._read():
                break
        self._show(self._lines.rest())

    def close(self) -> None:
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
        """Read once; return whether there may be more to read now."""
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


class Console:
    """Prefixes by rank, in color on a terminal, and the launcher's own lines on stderr.

    If stdout and stderr are the same file or terminal, they share one outlet, so that their lines
    never mix.
    """

    def __init__(self, loop: EventLoop) -> None:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        sys.stdout.flush()
        sys.stderr.flush()
        self._opened: list[int] = []
        self.stdout = Outlet(loop, self._nonblocking(out))
        self.stderr = self.stdout if _same_file(out, err) else Outlet(loop, self._nonblocking(err))
        streams = {1: sys.stdout, 2: sys.stderr}
        self._rich = {n: RichConsole(file=file, highlight=False) for n, file in streams.items()}

    def prefix(self, rank: int, stream: int) -> bytes:
        return self._styled(f"[{rank}]", _COLORS[rank % len(_COLORS)], stream).encode() + b" "

    def say(self, *lines: str, failed: bool = False) -> None:
        """Print the launcher's own lines, with the local time; `failed` if the job has failed."""
        prefix = self._styled("[outlast]", _FAILED if failed else _OWN, 2)
        now = time.strftime("%H:%M:%S")
        for line in lines:
            self.stderr.write(f"{prefix} {now} {line}\n".encode(errors="backslashreplace"))

    @property
    def pending(self) -> bool:
        return self.stdout.pending or self.stderr.pending

    def drop(self) -> None:
        self.stdout.drop()
        self.stderr.drop()

    def close(self) -> None:
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    def _nonblocking(self, fd: int) -> int:
        """For a terminal, a descriptor that never blocks, even if output is paused (Ctrl-S).

        The terminal is reopened, because the non-blocking flag is shared by all processes with the
        same open file, including the shell.
        """
        if not os.isatty(fd):
            return fd
        try:
            own = os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return fd  # another user's terminal (su, sudo)
        self._opened.append(own)
        return own

    def _styled(self, text: str, style: str, stream: int) -> str:
        # rich decides whether the terminal has colors (NO_COLOR, TERM, ...); without a terminal
        # the text is returned unchanged.
        rich = self._rich[stream]
        coloured = rich.is_terminal and rich.color_system is not None and not rich.no_color
        system = ColorSystem.STANDARD if coloured else None
        return Style.parse(style).render(text, color_system=system)


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False  # one of them is closed
