"""The launcher's stdout and stderr: the lines of the workers, and its own messages."""

from __future__ import annotations

import os
import sys
import time

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.output import Outlet

# The 8 colors of every terminal, except black and white (backgrounds) and red (a failed job).
_COLORS = ("cyan", "green", "yellow", "blue", "magenta")
_OWN, _FAILED = "bold", "bold red"


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
