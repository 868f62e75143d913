"""What `make demo` shows: the same weights through faults, and no step made twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (
    sys.executable,
    "-m",
    "outlast.launch",
    "run",
    "--nproc-per-node",
    "4",
    "--max-restarts",
    "8",
)


def run(folder: Path, *options: str) -> str:
    """Runs the example, shortened to 1,200 steps; returns its output."""
    command = [*RUN, *options, str(EXAMPLES / "digits.py"), "--epochs", "80", "--state", "state"]
    folder.mkdir()
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_no_step_is_made_twice_and_the_weights_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plan = (EXAMPLES / "digits_faults.json").read_text()
    short = tmp_path / "plan.json"
    short.write_text(plan.replace("1000", "300").replace("1500", "600"))
    undisturbed = run(tmp_path / "without")
    disturbed = run(tmp_path / "with", "--chaos", str(short))
    results = [re.findall(r"accuracy .*", output) for output in (undisturbed, disturbed)]
    assert results[0] == results[1], disturbed
    assert results[0][0].endswith(", 1200 steps")
    assert disturbed.count("with the state of the surviving ranks") == 3, disturbed
    assert "restored step" not in disturbed
