"""The programs and commands of the README and of the page Start run as pasted.

Not run: the commands that install from the network, of which only the syntax is checked.
`make dist` names the commands of another environment in `OUTLAST_BIN`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
# The processes have numbers of their own: the README's `pkill` finds no other program.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
RUN = """
(sh -e run.sh; echo "exit code $?") >log 2>&1 &
tail --follow --retry log 2>/dev/null | grep --max-count 1 "standby pid"
sh -e kill.sh
wait
"""


BEFORE_LOOP = """
import torch
from torch import nn

import outlast

torch.manual_seed(0)
features, targets = torch.randn(32, 20), torch.randn(32, 1)
inputs = features
model = nn.Linear(20, 1)
optimizer = torch.optim.Adam(model.parameters())
"""
LOOP = """
    for _ in range(job.steps, 100):
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step()
print(f"best {best.loss:.4f}")
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def paste(folder: Path, commands: str) -> str:
    """Runs the lines of a block; returns what they print."""
    done = subprocess.run(
        ["sh", "-e"],
        input=commands,
        cwd=folder,
        env={**os.environ, "PATH": path()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def path() -> str:
    commands = Path(os.environ.get("OUTLAST_BIN", Path(sys.executable).parent)).absolute()
    return f"{commands}{os.pathsep}{os.environ['PATH']}"


def test_every_block_is_one_that_a_test_runs() -> None:
    languages = [re.findall(r"^```(\w+)", (ROOT / page).read_text(), re.M) for page in PAGES]
    assert languages == [["sh", "python", "sh", "sh", "console", "python"], ["sh", "sh"]]
    install = blocks("README.md", "sh")[0].replace("<this repository>", "repository")
    subprocess.run(["sh", "-n"], input=install, text=True, check=True)


@pytest.mark.slow
def test_the_first_program_survives(tmp_path: Path) -> None:
    if os.getuid() != 0 or subprocess.run([*ALONE, "true"], check=False).returncode != 0:
        pytest.skip("no namespace of processes can be made here")
    program, _ = blocks("README.md", "python")
    _, run, kill = blocks("README.md", "sh")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.sh").write_text(run)
    (tmp_path / "kill.sh").write_text(kill)
    subprocess.run(
        [*ALONE, "bash", "-c", RUN], cwd=tmp_path, env={**os.environ, "PATH": path()}, check=True
    )
    log = (tmp_path / "log").read_text()
    assert log.endswith("exit code 0\n"), log
    (shown,) = blocks("README.md", "console")
    for line in shown.splitlines():
        # As in the README, but for times and numbers.
        pattern = re.sub(r"\d+", r"\\d+", re.escape(re.sub(r"^\[outlast\] \S+ ", "", line)))
        # The kill may come where ranks that live are a step behind too.
        pattern = pattern.replace(r"rank\ \d+\ received", r"ranks?\ [\d, ]+\ received")
        assert re.search(pattern.replace(r"\[\d+\]", r"\[\d\]"), log), f"{line}\n{log}"
    losses = re.findall(r"step (\d+): loss \d", log)
    assert [int(step) for step in losses] == list(range(25, 1001, 25)), log
    assert "1 restart" in log


@pytest.mark.slow
def test_the_functions_of_a_step(tmp_path: Path) -> None:
    _, example = blocks("README.md", "python")
    head, mark, tail = example.partition("    ...  # the loop, as above\n")
    assert mark
    assert not tail
    assert 'best=1, mode="min"' in head  # its metric is a loss
    (tmp_path / "train.py").write_text(BEFORE_LOOP + head + LOOP)
    run = f"{sys.executable} train.py"
    first, again = (paste(tmp_path, run) for _ in range(2))
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert [int(step) for step, *_ in rows] == [50, 100]
    best = min(float(loss) for _, loss, _ in rows)
    assert float(rows[1][2]) == best
    assert first.splitlines()[-1] == again.splitlines()[-1] == f"best {best:.4f}"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_injected_fault_is_in_the_report(tmp_path: Path) -> None:
    program, _ = blocks("README.md", "python")
    (tmp_path / "train.py").write_text(program)
    printed = paste(tmp_path, blocks("docs/quickstart.md", "sh")[0])
    assert "1 restart: 1 x ChaosError" in printed
    assert "continuing after step 210 with the state of the surviving ranks" in printed
    _, _, report = printed.partition("job completed")
    assert re.search(r"rank 1: ChaosError", report), printed
    assert "ChaosError" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_losses_through_an_exception_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert paste(tmp_path, blocks("docs/quickstart.md", "sh")[1]).endswith("no differing loss\n")
