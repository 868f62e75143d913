"""The example of docs/elastic.md: restart in place, saves and elastic state in one program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from zygote import Zygote, shared

SCRIPT = Path(__file__).parents[1] / "scripts" / "elastic_page.py"
STEPS = 40  # ten epochs of 300 samples, 96 a step


def run(results: Path, fault: str, every: int = 100) -> str:
    """Runs the example; returns its output."""
    results.mkdir()
    run = ("-m", "outlast.launch", "run", "--standby=0", "--nproc-per-node", "2")
    command = [sys.executable, *run]
    done = shared().run(
        [*command, str(SCRIPT), str(results), fault, str(every)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=120,
        workers=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained_on(results: Path) -> dict[int, list[list[int]]]:
    """The samples of each rank in each step, the last time the step ran."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(2):
        steps: dict[int, list[int]] = {}
        for line in (results / f"rank{rank}").read_text().splitlines():
            said = json.loads(line)
            steps[said["step"]] = said["indices"]
        for step, indices in steps.items():
            found.setdefault(step, []).append(indices)
    return found


def weights(results: Path) -> str:
    first, second = ((results / f"weights{rank}").read_text() for rank in range(2))
    assert first == second
    return first


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """The results of a run without a fault."""
    results = tmp_path_factory.mktemp("reference") / "results"
    run(results, "none")
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "every"),
    [("exception", 6), pytest.param("SIGKILL", 100, marks=pytest.mark.slow)],
)
def test_a_fault_within_an_epoch_does_not_change_the_result(
    tmp_path: Path, reference: Path, fault: str, every: int
) -> None:
    results = tmp_path / "results"
    printed = run(results, fault, every)
    for rank in range(2):
        assert f"[{rank}] rank {rank}: {STEPS} steps, 3000 samples\n" in printed
    assert (results / "fault").exists()
    steps = trained_on(results)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for epoch in range(10):
        seen = [i for step in range(4) for taken in steps[4 * epoch + step + 1] for i in taken]
        assert sorted(seen) == list(range(300))
    assert steps == trained_on(reference)
    assert weights(results) == weights(reference)
