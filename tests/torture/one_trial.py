"""A trial in a folder of its own, which is kept if it has found a violation."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .crash_states import Result

KEPT = Path(__file__).parents[2] / "build" / "torture"


def one_trial(
    name: str, seed: int, trial: Callable[[Path, random.Random], tuple[int, list[str]]]
) -> Result:
    """Makes a trial in a folder of its own, which is kept if it has found a violation."""
    for variable in ("LD_PRELOAD", "TORTURE_CONTROL"):
        os.environ.pop(variable, None)  # here, no file-system call is recorded
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        tried, violations = trial(folder, random.Random(f"{name}/{seed}"))
        if violations:
            kept = KEPT / f"{name}-{seed}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
            (kept / "violations").write_text("\n\n".join(violations))
            violations = [f"{text[:3000]}\n    logs: {kept}" for text in violations]
        return Result(tried, violations)
    finally:
        shutil.rmtree(folder)
