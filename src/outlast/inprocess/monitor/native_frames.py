"""Where the main process is in native code, if `py-spy` is installed: for one that cannot say so
itself, because a thread of it holds the GIL. py-spy reads the process by ptrace, which may not be
allowed, as in a container; that is said in one line.

It runs beside the loop of the monitor process, which goes on with its heartbeats: it is begun
before the soft timeout, so that the report of the hang has its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from outlast.clock import Clock
from outlast.inprocess.monitor.reports import MonitorPlan, write_for, write_line
from outlast.inprocess.monitor.shared_page import NOTICE_AFTER_S, Activity
from outlast.inprocess.monitor.timeouts import is_stopped, timeouts_in_force
from outlast.system.processes import open_process

TITLE = "Native frames of process"
"""Begins `NativeFrames.text`."""

_LIMIT_S = 20.0  # it reads the symbols of every library
_FRAMES = 40
_IN_A_LINE = 12


class NativeFrames:
    """The frames of the main process `main`, once for each time that it runs no Python code.
    `poll` is woken up when they are there.

    Attributes:
        text: those of the present hang, one a line; empty if there are none.
    """

    def __init__(
        self, plan: MonitorPlan, main: int, clock: Clock, host: str, poll: select.poll
    ) -> None:
        self._plan, self._page, self._main = plan, plan.page, main
        self._clock, self._host, self._poll = clock, host, poll
        self._command = find_py_spy()
        self._dump: tuple[subprocess.Popen[bytes], int, int, float] | None = None
        self._of = 0.0  # the timestamp of the last Python code, before the hang
        self.text = ""

    def check(self) -> None:
        """Call it regularly, and when `poll` is woken up."""
        if not self._command:
            return
        page, now = self._page, self._clock.now()
        if self._dump is not None:
            process, _, _, until = self._dump
            if process.poll() is not None:
                self._finish(process.returncode)
            elif now >= until:
                self.close()
                self._say(f"are not known: py-spy took longer than {_LIMIT_S:.0f} s")
            return
        last = page.heartbeat or page.progress
        if last != self._of:
            self.text = ""
        if page.activity != Activity.FUNCTION or page.long_limit or last == self._of:
            return
        soft = timeouts_in_force(self._plan, page, Activity.FUNCTION).soft
        # A process that was stopped would go on when py-spy detaches from it.
        if now - last >= min(NOTICE_AFTER_S, soft / 2) and not is_stopped(self._main):
            self._of = last
            self._begin(now)

    def close(self) -> None:
        """Ends py-spy, if it runs."""
        if self._dump is not None:
            process, pidfd, output, _ = self._dump
            process.kill()
            process.wait()
            self._release(pidfd, output)

    def _begin(self, now: float) -> None:
        output = os.memfd_create("py-spy")
        command = [self._command, "dump", "--native", "--json", "--pid", str(self._main)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        except OSError as e:
            os.close(output)
            self._say(f"are not known: {e}")
            return
        pidfd = open_process(process.pid)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)
        self._dump = process, -1 if pidfd is None else pidfd, output, now + _LIMIT_S

    def _finish(self, code: int) -> None:
        assert self._dump is not None
        _, pidfd, output, _ = self._dump
        size = os.fstat(output).st_size
        said = os.pread(output, size, 0).decode(errors="replace")
        self._release(pidfd, output)
        frames = frames_of(said, self._page.function_thread) if code == 0 else []
        if not frames:
            error = said.strip().partition("\n")[0] or f"it ended with code {code}"
            self._say(f"are not known: py-spy: {error}")
            return
        shown = "\n".join(f"    {frame}" for frame in frames[:_FRAMES])
        self.text = f"{TITLE} {self._main}, innermost first:\n{shown}"
        self._say(f"are {' < '.join(frames[:_IN_A_LINE])}")

    def _release(self, pidfd: int, output: int) -> None:
        self._dump = None
        if pidfd >= 0:
            with contextlib.suppress(KeyError):
                self._poll.unregister(pidfd)
            os.close(pidfd)
        os.close(output)

    def _say(self, what: str) -> None:
        rank = self._page.rank
        line = f"rank {rank} on {self._host}: the native frames of process {self._main} {what}"
        write_line(line)
        write_for(self._main, line)


def find_py_spy() -> str:
    """The executable of py-spy: in `PATH`, or beside the interpreter; empty if there is none."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent) or ""


def frames_of(dump: str, thread: int) -> list[str]:
    """The frames of the thread that holds the GIL, innermost first, from the JSON of py-spy; of
    `thread`, if none does. Empty if it is no such JSON.
    """
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
