"""Clocks of hosts that run too fast or too slow."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "hosts" / "scripts" / "wall_clock.c"


@contextlib.contextmanager
def library() -> Iterator[str]:
    """The library to preload; empty where there is no compiler."""
    if shutil.which("cc") is None:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="torture-clock-") as folder:
        path = f"{folder}/clock.so"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", path, str(_SOURCE), "-ldl", "-pthread"]
        subprocess.run(command, check=True)
        yield path


def environment(library: str, rate: float, base_s: float) -> dict[str, str]:
    """For a process whose monotonic clock runs at `rate` from `base_s` on."""
    return {"LD_PRELOAD": library, "MONOTONIC_RATE": str(rate), "MONOTONIC_BASE": str(base_s)}
