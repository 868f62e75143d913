"""Forged and corrupted files are never believed; see `forged_files`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = int(os.environ.get("TORTURE_SEED", "0"))
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "most",
    [
        40,
        pytest.param(1500, marks=pytest.mark.slow),
        pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.exhaustive
def test_no_forged_file_is_believed(most: int) -> None:
    """In a process of its own: a crash, a hang and a limit of its memory are its own too."""
    program = (
        "import json, logging, math\n"
        "logging.disable(logging.CRITICAL)\n"
        "from torture.forged_files import try_forged_files\n"
        f"print(json.dumps(try_forged_files({SEED}, until=math.inf, most={most})))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tried, violations = json.loads(done.stdout.splitlines()[-1])
    assert not violations, "\n".join(violations[:5])
    assert tried == most
