"""Jobs of `scripts/first_day.py`, on any device, and what must hold after them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launch.runs import Run

SCRIPT = f"""
import runpy, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
runpy.run_path({str(Path(__file__).parent / "scripts" / "first_day.py")!r}, run_name="__main__")
"""


def run(
    tmp_path: Path,
    *scenario: str,
    ranks: int = 2,
    replaced: int = 0,
    has_fault: bool = True,
    env: Mapping[str, str] | None = None,
) -> str:
    """All ranks end with "trained", with so many replacements; returns what was said."""
    options = f"--nproc-per-node={ranks}"
    quiet = bool(env and env.get("DEVICE"))  # what torch logs of NCCL is not known yet
    with Run(tmp_path, SCRIPT, options, args=scenario, env=env, quiet=quiet) as job:
        assert job.wait() == 0, job.err
    assert job.out.count("trained") == ranks, job.err
    found = [line for line in job.words if "replacement" in line]
    assert len(found) == replaced, job.err
    assert replaced or not has_fault or "ValueError: planned" in job.err, job.err
    return job.out


def resize(tmp_path: Path, *ranks: int, env: Mapping[str, str] | None = None) -> None:
    """A job ends and comes back with each of these numbers of ranks, at the step that it was at."""
    for number, count in enumerate(ranks, 1):
        folder = str(tmp_path / "checkpoints")
        out = run(tmp_path, "resized", folder, ranks=count, has_fault=False, env=env)
        assert out.count(f"steps {5 * number}") == count, out
