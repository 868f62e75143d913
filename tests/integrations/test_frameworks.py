"""Each adapter, with its framework: a fault changes no loss, no metric and no weight.

The scripts run in a process of their own, since frameworks keep threads and handlers. The examples
of `examples/ports` meet signals and replaced processes, in `tests/ports`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from procs import default_signals

SCRIPTS = Path(__file__).parent / "scripts"
NET_S = 900.0  # a busy machine takes ten times as long


def completed(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=NET_S,
        check=False,
        preexec_fn=default_signals,
    )


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("framework", "script"),
    [
        ("lightning", "lightning_fits"),
        pytest.param("lightning", "lightning_checkpoints", marks=pytest.mark.exhaustive),
        ("transformers", "trainer_runs"),
        ("accelerate", "accelerate_loops"),
    ],
)
def test_a_fault_changes_no_loss_no_metric_and_no_weight(
    tmp_path: Path, framework: str, script: str
) -> None:
    pytest.importorskip(framework, reason="make test-ports")
    done = completed([sys.executable, str(SCRIPTS / f"{script}.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    # Other packages print lines that begin with "[".
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert runs
    for name, expected, found in runs:
        assert set(found) == set(expected), f"{name}: {set(found) ^ set(expected)}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_what_the_frameworks_do_after_a_training(
    tmp_path: Path, framework: str, nprocs: int
) -> None:
    pytest.importorskip(framework, reason="make test-ports")
    script = str(SCRIPTS / "after_training.py")
    command = [sys.executable, script]
    if nprocs > 1:
        launcher = str(Path(sys.executable).with_name("outlast"))
        command = [launcher, "run", "--nproc-per-node", str(nprocs), script]
    done = completed([*command, framework, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("called all") == nprocs, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
