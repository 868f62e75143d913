"""A launcher that is started without standard streams, as by some daemons."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, sys
print("a line")
print("another", file=sys.stderr)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_job_runs_as_with_them(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launcher = [sys.executable, "-m", "outlast.launch", "run", "--nproc-per-node=2", "--standby=0"]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *launcher, str(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "worker.py"}
    has_stdout = " >&-" not in f" {closed}"
    assert ended.stdout.count("a line") == 2 * has_stdout
