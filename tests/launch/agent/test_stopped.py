"""A worker that is stopped, in a script without a wrapped function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NET_S = 120
LAUNCHER = """
import sys
from outlast.launch.agent import departures
from outlast.launch.cli import main

departures._STOPPED_S = float(sys.argv.pop(1))
main()
"""
SCRIPT = """
import os, pathlib, signal, sys, time

there = pathlib.Path("stopped")
if os.environ["RANK"] == "1" and not there.exists():
    there.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
elif sys.argv[1] == "continued":
    state = lambda: pathlib.Path(f"/proc/{there.read_text()}/stat").read_text()
    while not there.exists() or ") T" not in state():
        time.sleep(0.01)
    os.kill(int(there.read_text()), signal.SIGCONT)
print("DONE", os.environ["RANK"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "limit_s"), [("killed", "0.5"), ("continued", "100")])
def test_it_is_ended_unless_it_goes_on(tmp_path: Path, how: str, limit_s: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-c", LAUNCHER, limit_s, "run", "--standby=0", "--max-restarts=1"]
    ended = subprocess.run(
        [*launch, "--nproc-per-node=2", "script.py", how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NET_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert {line[-6:] for line in ended.stdout.splitlines()} == {"DONE 0", "DONE 1"}
    killed = f"killed by SIGKILL from the launcher, after it was stopped for {limit_s} s"
    assert (killed in ended.stderr) == (how == "killed"), ended.stderr
    assert (
        "was stopped by SIGSTOP: it is killed unless it goes on" in ended.stderr or how != "killed"
    )
