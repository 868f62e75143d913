"""Jobs that a launcher starts, whose processes all end with the benchmark, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.process_tree import adopt_orphans, die_with_parent, end_descendants

__all__ = ["LaunchedJob", "read_log"]

_TAIL = 3000


class LaunchedJob:
    """The launchers of one job, in a `with` block: at its end, everything they started is killed.

    Args:
        folder: a folder of its own; `output.log` there has what the job prints.
    """

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output.log"
        self._launchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LaunchedJob:
        adopt_orphans()
        self._output.touch()
        return self

    def __exit__(self, *_: object) -> None:
        end_descendants()
        for launcher in self._launchers:
            launcher.wait()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts a launcher."""
        with self._output.open("ab") as output:
            launcher = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # If this process is killed, the launcher ends its workers.
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self._launchers.append(launcher)

    @property
    def output(self) -> str:
        """What the job has printed."""
        return self._output.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether all launchers have ended."""
        return all(launcher.poll() is not None for launcher in self._launchers)

    def check(self) -> None:
        """Raises `RuntimeError` with the end of the output if a launcher has ended."""
        for launcher in self._launchers:
            if launcher.poll() is not None:
                raise RuntimeError(
                    f"{Path(launcher.args[0]).name} ended with {launcher.returncode}:\n"  # type: ignore[index, arg-type]
                    f"{self.output[-_TAIL:]}"
                )

    def wait_for(self, happened: Callable[[], object], timeout: float, what: str) -> None:
        """Waits until `happened`.

        Raises:
            RuntimeError: if the job ends before, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not happened():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {timeout:g} s:\n{self.output[-_TAIL:]}")
            time.sleep(0.05)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log, each a JSON object."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
