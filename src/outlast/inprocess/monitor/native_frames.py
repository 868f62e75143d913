"""Where a process is in native code that is about to be terminated: one whose thread holds the GIL
cannot say so itself. `py-spy` reads the frames, if it is installed, by ptrace, which stops the
process meanwhile: right only for one that is given up. Where ptrace is not allowed, as in a
container, that is said in one line.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
from typing import IO, Any

from outlast.clock import Clock
from outlast.system.processes import is_stopped, open_process

_LIMIT_S = 15.0  # it reads the symbols of every library
_FRAMES = 12


class NativeFrames:
    """The frames of the process `main`. `poll` is woken up when they are there. `said` is what is
    known of them, once `is_over`; empty without py-spy. `until` is the time at which they are given
    up: `spare_s` after the beginning, or 15 s.
    """

    def __init__(self, main: int, clock: Clock, poll: select.poll, spare_s: float) -> None:
        self._main, self._clock, self._poll = main, clock, poll
        self._limit_s = min(_LIMIT_S, spare_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._pidfd, self._thread = -1, 0
        self.said, self.until = "", 0.0

    def begin(self, thread: int) -> None:
        """Starts py-spy. Of several threads, the one that holds the GIL counts, or `thread`."""
        command = shutil.which("py-spy")
        # A process that was stopped would go on when py-spy detaches from it.
        if not command or self._limit_s <= 0 or is_stopped(self._main):
            return
        self._thread, self.until = thread, self._clock.now() + self._limit_s
        dump = [command, "dump", "--native", "--json", "--pid", str(self._main)]
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
            self._process = subprocess.Popen(
                dump, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
            )
        except OSError as e:
            self.said = f"are not known: {e}"
            self.close()
            return
        pidfd = open_process(self._process.pid)
        if pidfd is not None:
            self._pidfd = pidfd
            self._poll.register(pidfd, select.POLLIN)

    def is_over(self) -> bool:
        """Whether there is nothing to wait for, or no longer. Call it regularly."""
        if self._process is None or self._output is None:
            return True
        code = self._process.poll()
        if code is None and self._clock.now() < self.until:
            return False
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        frames = frames_of(output, self._thread) if code == 0 else []
        if frames:
            self.said = f"are {' < '.join(frames[:_FRAMES])}"
        else:
            took = f"it took longer than {self._limit_s:.0f} s"
            why = took if code is None else output.strip().partition("\n")[0] or f"code {code}"
            self.said = f"are not known: py-spy: {why}"
        self.close()
        return True

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pidfd >= 0:
            self._poll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._output is not None:
            self._output.close()
            self._output = None


def frames_of(dump: str, thread: int) -> list[str]:
    """The frames, innermost first, of the thread with the GIL or of `thread`; may be empty."""
    try:
        threads: list[dict[str, Any]] = json.loads(dump)
        found = max(threads, key=lambda each: (each["owns_gil"], each["os_thread_id"] == thread))
        return [_frame(each) for each in found["frames"]]
    except (KeyError, TypeError, ValueError):
        return []


def _frame(frame: dict[str, Any]) -> str:
    place = frame["short_filename"] or frame["filename"]
    line = f":{frame['line']}" if frame["line"] else ""
    return f"{frame['name']} ({place}{line})"
