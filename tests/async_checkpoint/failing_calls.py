"""Real system calls of the writer process that fail, take effect and report an error, or are the
last ones of their process: the library of `failing_calls.c` is loaded into it.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("failing_calls.c")
_EVER = 1 << 30


@functools.cache
def _library() -> str:
    folder = tempfile.mkdtemp(prefix="outlast-failing-calls-")
    built = os.path.join(folder, "failing_calls.so")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", built, str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return built


class FailingCalls:
    """The plan for the processes that start with the library from now on.

    A call is `rename`, `renameat2` or `fsync`, of a path with the ending `path`; `how` is `error`,
    `done` (it takes effect, and reports an error), or `before` or `after`: the process is killed.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._plan = folder / "failing-calls"
        monkeypatch.setenv("FAILING_CALLS", str(self._plan))
        monkeypatch.setenv("LD_PRELOAD", _library())

    def set(
        self,
        call: str,
        path: str = "*",
        error: int = errno.EIO,
        how: str = "error",
        first: int = 1,
        last: int = _EVER,
    ) -> None:
        """From the `first` to the `last` such call of each process."""
        self._plan.write_text(f"{call} {path} {error} {how[0]} {first} {last}\n")

    def clear(self) -> None:
        """No call fails."""
        self._plan.unlink(missing_ok=True)
