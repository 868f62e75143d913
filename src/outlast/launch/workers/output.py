"""The output of the workers: lines with a rank prefix on the console, and bytes in files.

The launcher must never wait for the reader of its own output: a paused pager would keep it from
noticing a worker's death. So it writes only as much as a descriptor takes without waiting. When too
much is unwritten, it stops *reading* from the workers, which then wait as they would without a
launcher. Regardless of the bytes that workers write, the console gets complete lines of valid
UTF-8; files get the bytes unchanged.

A line without an end is a progress bar, a prompt or the like. A terminal shows the present state of
each below all other lines, in place. Elsewhere its state is written every few seconds as a line, if
it has changed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import selectors
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from rich.cells import set_cell_size
from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

from outlast.launch.event_loop import EventLoop, Timer

# The 8 colors of every terminal, except black and white (backgrounds) and red (a failed job).
_COLORS = ("cyan", "green", "yellow", "blue", "magenta")
_OWN, _FAILED = "bold", "bold red"

KEPT_LINES = 40
"""The number of a worker's last lines to keep for the summary of the job."""
LINE_LIMIT = 64 * 1024
"""Longer lines are shown in pieces: a worker that never ends a line must not exhaust memory."""
_BAR_LIMIT = 1024  # each update of a bar costs time by what is kept of it
PENDING_LIMIT = 1024 * 1024
"""With this many bytes unwritten, reading from the workers stops."""
CHUNK = 64 * 1024
STATE_S = 5.0
"""How often the state of a line without an end is written where there is no terminal."""
# A second bar of tqdm is in the next row: down, its state, up again. It is taken for a state of the
# same line. So a line of a bar has no end yet if what follows may be such a bar.
_LOWER_BAR = re.compile(rb"\n{1,9}((?:\r[^\n\r\x1b]*)+)(?:\x1b\[A)+")
_LOWER_BAR_SO_FAR = re.compile(rb"(?:\r[^\n\r\x1b]*)*(?:\x1b\[?)?")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
DRAIN_READS = 16
"""A pipe holds one or two chunks; the bound is for a child that writes as fast as it is read."""


def say_early(line: str) -> None:
    """Print a line of the launcher while it has no `Console`, and no workers that would wait."""
    with contextlib.suppress(OSError):  # a closed terminal must not end the launcher
        sys.stderr.write(f"[outlast] {time.strftime('%H:%M:%S')} {line}\n")
        sys.stderr.flush()


class Lines:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = _LOWER_BAR.sub(rb"\1", self._partial + data)
        end = _before_bar(data)
        *lines, self._partial = data[:end].split(b"\n")
        self._partial += data[end:]
        if len(self._partial) > _BAR_LIMIT:  # of a progress bar the last state is enough
            self._partial = self._partial[max(0, self._partial.rstrip(b"\r").rfind(b"\r")) :]
        while len(self._partial) > LINE_LIMIT:
            lines.append(self._partial[:LINE_LIMIT])
            self._partial = self._partial[LINE_LIMIT:]
        return lines

    @property
    def partial(self) -> str:
        return readable(self._partial.rstrip(b"\n"))

    def rest(self) -> list[bytes]:
        rest, self._partial = self._partial, b""
        return rest.removesuffix(b"\n").split(b"\n") if rest else []


def _before_bar(data: bytes) -> int:
    """The end of what is before a line of a bar at the end of `data`, if a lower bar may follow."""
    above, _, below = data.rpartition(b"\n")
    above = above.rstrip(b"\n")
    start = above.rfind(b"\n") + 1
    is_bar = b"\r" in above[start:].rstrip(b"\r") and _LOWER_BAR_SO_FAR.fullmatch(below)
    return start if is_bar else len(data)


def readable(line: bytes) -> str:
    """A line as a terminal would show it, with bytes that are not UTF-8 escaped.

    For a progress bar, which rewrites its line, only the last state is kept.
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")


class Outlet:
    """Writes to a descriptor that may be slow, without waiting for it. Below all else, a terminal
    shows lines that have no end yet.
    """

    def __init__(self, loop: EventLoop, fd: int) -> None:
        self._loop, self._fd = loop, fd
        self._buffer = bytearray()
        self._watched = False
        self._closed = False
        self.when_room: list[Callable[[], None]] = []
        self.is_terminal = os.isatty(fd)
        self._open: dict[object, tuple[str, str]] = {}
        self._drawn = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        return len(self._buffer) >= PENDING_LIMIT

    @property
    def pending(self) -> bool:
        return bool(self._buffer)

    def write(self, data: bytes, ending: object = None) -> None:
        """Write lines, now or later; they are dropped once the reader has closed. The line without
        end of `ending` is one of them.
        """
        self._open.pop(ending, None)
        if not self._closed:
            if self._drawn:  # erased
                self._buffer += b"\r" + b"\x1b[A" * (self._drawn - 1) + b"\x1b[J"
            self._buffer += data + self._drawing()
            self._flush()

    def show(self, owner: object, prefix: str, text: str) -> None:
        """Show a line without end in place, below all lines; only on a terminal."""
        self._open[owner] = prefix, _ESCAPES.sub("", text)
        self.write(b"")

    def _drawing(self) -> bytes:
        """Each in a row of its own, cut at the width of the terminal; the first that fit."""
        if not self._open:
            self._drawn = 0
            return b""
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            columns = rows = 0  # as where nothing has told the terminal its size
        shown = []
        for prefix, text in list(self._open.values())[: max(1, (rows or 24) - 1)]:
            room = max(0, (columns or 80) - 1 - len(_ESCAPES.sub("", prefix)))
            shown.append(prefix + set_cell_size(text, room).rstrip())
        self._drawn = len(shown)
        return "\n".join(shown).encode()

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
            waiting, self.when_room = self.when_room, []
            for callback in waiting:
                callback()


class Capture:
    """One output stream of one worker.

    Args:
        fd: the reading end of the pipe; closed by `close`.
        file: gets the bytes unchanged; closed with the stream.
    """

    def __init__(
        self, loop: EventLoop, fd: int, prefix: bytes, outlet: Outlet | None, file: BinaryIO | None
    ) -> None:
        self._loop, self._fd, self._prefix, self._outlet = loop, fd, prefix, outlet
        self._file = file
        self._lines = Lines()
        self._state = ""  # of a line without end, as it was written last
        self._timer = Timer()
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
            self._outlet.when_room.append(self._resume)

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
        self._show_state()
        return True

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        texts = [readable(line) for line in lines]
        self.last.extend(texts)
        if self._state and texts[0] == self._state:  # that is there already
            del texts[0]
        self._state = ""
        if self._outlet is not None:
            data = b"".join(self._prefix + text.encode() + b"\n" for text in texts)
            self._outlet.write(data, ending=self)

    def _show_state(self) -> None:
        text = self._lines.partial
        if self._outlet is None or text == self._state or text.isspace():
            return
        if self._outlet.is_terminal:
            self._outlet.show(self, self._prefix.decode(), text)
        elif not self._timer.pending:
            self._timer = self._loop.call_later(STATE_S, self._write_state)

    def _write_state(self) -> None:
        text = self._lines.partial
        if self._open and self._outlet is not None and text.strip() and text != self._state:
            self._state = text
            self._outlet.write(self._prefix + text.encode() + b"\n")

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        self._timer.cancel()
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
