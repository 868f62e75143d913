"""What the examples show: the same weights through faults, and no step made twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (sys.executable, "-m", "outlast.launch", "run", "--max-restarts", "8")


def run(folder: Path, *options: str, ranks: int = 4, name: str = "digits", epochs: int = 80) -> str:
    """Runs the example, shortened to so many epochs; returns its output."""
    script = [str(EXAMPLES / f"{name}.py"), "--epochs", str(epochs), "--state", "state"]
    command = [*RUN, "--nproc-per-node", str(ranks), *options, *script]
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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_several_models_end_with_the_same_weights(tmp_path: Path) -> None:
    """The rank that is killed may have been the only one that had completed its last step."""
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"faults": [{"rank": 1, "iteration": 0, "step": 40, "kind": "exception"},'
        ' {"rank": 0, "iteration": 1, "step": 90, "kind": "sigkill"}]}'
    )
    training: dict[str, Any] = {"ranks": 2, "name": "gan", "epochs": 12}
    undisturbed = run(tmp_path / "without", **training)
    disturbed = run(tmp_path / "with", "--chaos", str(plan), **training)
    results = [re.findall(r"weights .*", output) for output in (undisturbed, disturbed)]
    assert results[0] == results[1], disturbed
    assert results[0][0].endswith(", 120 steps")
    assert "continuing after step 40 with the state of the surviving ranks" in disturbed
