"""`outlast run` of an example in `examples/ports`, as a user starts it, with faults from outside.

    with PortRun(folder, ["nanogpt.py", "--max-iters", "40"]) as run:
        run.wait_for_step(5)
        run.send(1, signal.SIGKILL)
        assert run.wait() == 0
        print(run.losses()[1, 6])

Each rank of an example prints one line per step, `NAME STEP: loss VALUE`, with all digits of the
loss.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from procs import LINGER_S, MARKER, default_signals, marked

EXAMPLES = Path(__file__).parents[2] / "examples" / "ports"
NET_S = 240.0
"""How long a test waits for an event: more than the default timeouts for a stopped process."""

Losses = dict[tuple[int, int], set[str]]
"""By rank and step: all values that were printed, one per pass over that step."""

_LOSS = re.compile(r"\[(\d+)\] \w+ (\d+): loss (\S+)$")


class PortRun:
    """One run of a script on two ranks."""

    def __init__(self, folder: Path, script: Sequence[str], options: Sequence[str] = ()) -> None:
        self.id = uuid.uuid4().hex
        self.lines: list[str] = []
        self._folder = folder
        self._changed = threading.Condition()
        self._mark = 0
        self._ended = False
        command = [sys.executable, "-m", "outlast.launch", "run", "--nproc-per-node", "2"]
        self._process = subprocess.Popen(
            [*command, *options, str(EXAMPLES / script[0]), *script[1:]],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", MARKER: self.id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> PortRun:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        left = marked(self.id)
        _, left = psutil.wait_procs(left, timeout=LINGER_S)
        for process in left:
            process.kill()
        self._reader.join()
        with (self._folder / "output.txt").open("a") as file:
            file.write("\n".join([*self.lines, ""]))
        if error is None:
            assert not left, f"left behind: {left}\n{self.tail}"

    @property
    def tail(self) -> str:
        """The last lines of the output; all of it is in `output.txt`."""
        return "\n".join(self.lines[-60:])

    def wait_for_step(self, step: int) -> None:
        """Waits until each rank has printed a loss of `step` or of a later step, after the last
        event that this run has waited for.
        """
        self._wait_until(lambda: all(self._step(rank) >= step for rank in (0, 1)), f"step {step}")

    def wait_for_text(self, text: str) -> None:
        """Waits for a line that contains `text`, after the last event waited for."""
        self._wait_until(lambda: any(text in line for line in self.lines[self._mark :]), text)

    def losses(self) -> Losses:
        found: Losses = {}
        for match in filter(None, map(_LOSS.match, self.lines)):
            found.setdefault((int(match[1]), int(match[2])), set()).add(match[3])
        return found

    def send(self, rank: int, number: int) -> None:
        """Sends a signal to the worker with this rank."""
        for child in psutil.Process(self._process.pid).children():
            if child.environ().get("RANK") == str(rank):
                child.send_signal(number)
                return
        raise AssertionError(f"no process of rank {rank}:\n{self.tail}")

    def terminate(self) -> int:
        """Sends SIGTERM to the launcher, as a scheduler does; returns its exit code."""
        self._process.terminate()
        return self.wait()

    def press_ctrl_c(self) -> int:
        """Sends SIGINT to the launcher's process group, as a terminal does; returns the launcher's
        exit code.
        """
        os.killpg(self._process.pid, signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """The exit code of the launcher, when it has ended."""
        self._reader.join(NET_S)
        assert not self._reader.is_alive(), f"still running:\n{self.tail}"
        return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait_until(self, happened: Callable[[], bool], what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: happened() or self._ended, NET_S)
            assert happened(), f"waited in vain for {what}:\n{self.tail}"
            self._mark = len(self.lines)

    def _step(self, rank: int) -> int:
        """The latest step that a rank has printed since the last event waited for."""
        found = [_LOSS.match(line) for line in self.lines[self._mark :]]
        return max((int(m[2]) for m in found if m and int(m[1]) == rank), default=-1)
