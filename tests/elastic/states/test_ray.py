"""Inside a real Ray Tune trial, saving and loading go through the trial's own checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.elastic import from_ray

SCRIPT = Path(__file__).parents[1] / "scripts" / "ray_trial.py"


def test_outside_of_a_trial_ray_is_not_even_imported() -> None:
    assert not from_ray()
    assert "ray" not in sys.modules


# 25 s of processor time, most of it in processes that import Ray and torch one after another: with
# four times as many busy processes as cores it takes 130 s. The script ends itself before the net.
@pytest.mark.slow
def test_a_trial_that_fails_goes_on_from_its_states(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")
    # Ray is a cluster of processes that lives as long as the program that starts it.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "ray")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "all is well" in ended.stdout
