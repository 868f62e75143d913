"""A save with a metric that a fault cuts off is completed after it: no later save has its state."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import outlast
from async_checkpoint.staged_writer import Plan
from procs import Job

Ranks = Callable[..., Job]

KINDS: dict[str, dict[str, Any]] = {
    "an exception some steps later": {"rank": 1, "step": 4, "do": "raise"},
    "an exception in a job with a text file": {"rank": 1, "step": 4, "do": "raise", "log": True},
    "a kill of rank 1 some steps later": {"rank": 1, "step": 4, "do": "kill"},
    "a kill of rank 0 some steps later": {"rank": 0, "step": 4, "do": "kill"},
    "an exception in the step, before its copy": {"rank": 1, "step": 2, "do": "raise"},
    "a kill in the step, before its copy": {"rank": 1, "step": 2, "do": "kill"},
    "a kill in the last step": {"rank": 0, "step": 6, "do": "kill"},
}


def run(ranks: Ranks, tmp_path: Path, **plan: Any) -> Job:
    """Holds the save back until the fault has restarted the ranks."""
    stage = Plan(tmp_path / "plan")
    gate = stage.gate()
    arguments = json.dumps({"path": str(tmp_path / "c"), "plan": str(stage.folder), **plan})
    with ranks("best_model", arguments, nprocs=2) as job:
        job.start_all()
        for rank in range(2):
            job.wait_for_line(rank, lambda e: e["event"] == "trained" and e["step"] == 2)
        gate.arrived()
        (stage.folder / "at gate").touch()
        if plan["do"] == "kill":
            assert job.wait(plan["rank"]) == -9
            job.start(plan["rank"], env={"OUTLAST_REPLACEMENT": "1"})
        job.wait_for_line(
            1 - plan["rank"], lambda e: e["event"] == "begins" and e["iteration"] == 1
        )
        with contextlib.suppress(OSError):  # a writer that does not respond may have been replaced
            os.close(os.open(gate.go, os.O_WRONLY | os.O_NONBLOCK))
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_committed_after_the_restart(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    job = run(ranks, tmp_path, **KINDS[kind])
    lines = [line for rank in range(2) for line in job.lines(rank)]
    (digest,) = {line["digest"] for line in lines if line.get("step") == 2 and "digest" in line}
    model = nn.Linear(200, 200)
    with outlast.Checkpointer(tmp_path / "c") as checkpointer:
        found = {info.step: info.metric for info in checkpointer.checkpoints()}
        assert found.get(2) == 0.5, (found, job.errors(0), job.errors(1))
        checkpointer.verify(2)
        checkpointer.restore({"model": model.state_dict()}, step=2, strict=False)
    assert sum(each.detach().double().sum().item() for each in model.parameters()) == digest


@pytest.mark.slow
def test_a_lost_snapshot_is_said(ranks: Ranks, tmp_path: Path) -> None:
    job = run(ranks, tmp_path, **KINDS["an exception some steps later"], lose=True)
    with outlast.Checkpointer(tmp_path / "c") as checkpointer:
        assert 2 not in {info.step for info in checkpointer.checkpoints()}
    text = "the save of step 2, with the metric 0.5, was cut off by a fault and cannot be completed"
    assert job.errors(0).count(text) == 1
