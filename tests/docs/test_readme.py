"""The first program of the README runs as pasted, and survives the command beside it.

`make dist` names the commands of another environment in `OUTLAST_BIN`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
# The processes have numbers of their own: the README's `pkill` finds no other program.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
RUN = """
(sh -e run.sh; echo "exit code $?") >log 2>&1 &
tail --follow --retry log 2>/dev/null | grep --max-count 1 "standby pid"
sh -e kill.sh
wait
"""


def blocks(language: str) -> list[str]:
    section = README.read_text().partition("## Your first program")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_first_program_survives(tmp_path: Path) -> None:
    if os.getuid() != 0 or subprocess.run([*ALONE, "true"], check=False).returncode != 0:
        pytest.skip("no namespace of processes can be made here")
    (program,) = blocks("python")
    _, run, kill = blocks("sh")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.sh").write_text(run)
    (tmp_path / "kill.sh").write_text(kill)
    commands = Path(os.environ.get("OUTLAST_BIN", Path(sys.executable).parent)).absolute()
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [*ALONE, "bash", "-c", RUN], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True
    )
    said = (tmp_path / "log").read_text()
    assert said.endswith("exit code 0\n"), said
    (shown,) = blocks("console")
    for line in shown.splitlines():
        # As in the README, but for times and numbers.
        pattern = re.sub(r"\d+", r"\\d+", re.escape(re.sub(r"^\[outlast\] \S+ ", "", line)))
        assert re.search(pattern.replace(r"\[\d+\]", r"\[\d\]"), said), f"{line}\n{said}"
    losses = re.findall(r"epoch (\d+): loss (\S+)", said)
    assert [int(epoch) for epoch, _ in losses] == list(range(40)), said
    assert "1 restart" in said
