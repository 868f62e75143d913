"""The pipeline of docs/elastic.md, with `torch.distributed.pipelining`, survives faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic.live_trainings import Run, check_same, later
from launch import runs
from outlast.launch.cli import app

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROGRAM = f"""
import sys
import torch
sys.path.insert(0, {str(SCRIPTS)!r})
from pipeline_page import main

if __name__ == "__main__":
    main(sys.argv[1])
"""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("zygote")]


def train(
    tmp_path: Path,
    name: str,
    *faults: dict[str, Any],
    nprocs: int = 2,
    meanwhile: Callable[[runs.Run], None] | None = None,
    **plan: Any,
) -> Run:
    """Trains with `outlast run` to the end."""
    plan |= {"path": str(tmp_path / name), "faults": faults}
    options = [f"--nproc-per-node={nprocs}", f"--rdzv-id={tmp_path.name}"]
    with runs.Run(tmp_path, PROGRAM, *options, args=[json.dumps(plan)]) as run:
        if meanwhile is not None:
            meanwhile(run)
        assert run.wait() == 0, run.err
    found = re.findall(r"^\[\d\] (\{.*\})$", run.out, re.MULTILINE)
    return Run([json.loads(line) for line in found], run.err)


@pytest.mark.parametrize(
    "schedule", ["Schedule1F1B", pytest.param("ScheduleGPipe", marks=pytest.mark.exhaustive)]
)
def test_no_step_is_made_again_where_a_replica_of_the_stage_is_left(
    tmp_path: Path, schedule: str
) -> None:
    """An exception between two microbatches, while others wait to receive; and a kill in the last
    backward pass of the first stage, when the last one has its gradients.
    """
    given: dict[str, Any] = {"nprocs": 4, "schedule": schedule}
    faults = [
        *later(1, 5, "back 6 1", "raise", 4, iteration=0),
        *later(1, 8, "back 9 3", "pause, SIGKILL", 4, iteration=1),
    ]
    faulty = train(tmp_path, "faulty", *faults, **given)
    live = dict.fromkeys(range(4), (8, "live"))
    assert faulty.restored(1) == dict.fromkeys(range(4), (5, "live")), faulty.errors
    assert faulty.restored(2) == {**live, 1: (8, "replica")}, faulty.errors
    check_same(faulty, train(tmp_path, "reference", **given))


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_loss_of_the_only_copy_of_a_stage_costs_the_steps_since_the_checkpoint(
    tmp_path: Path, traced: bool
) -> None:
    """An exception in the last backward pass of the first stage costs none."""
    faults = [
        *later(0, 5, "back 6 3", "pause, raise", iteration=0),
        *later(0, 6, "micro 7 2", "SIGKILL", iteration=1),
    ]
    faulty = train(tmp_path, "faulty", *faults, traced=traced)
    assert faulty.restored(1) == dict.fromkeys((0, 1), (5, "live")), faulty.errors
    assert {step for step, _ in faulty.restored(2).values()} == {4}
    assert "is not used: step 6 lacks the tensors of rank 0; rank 0: a new process" in faulty.errors
    check_same(faulty, train(tmp_path, "reference", traced=traced))


def test_the_only_copy_of_a_stage_moves_to_another_process(tmp_path: Path) -> None:
    def drain(run: runs.Run) -> None:
        run.until(lambda: '"step": 5' in run.out, "some steps")
        said = ""
        while "is to move" not in said:
            options = ["drain", "--rank=1", f"--rdzv-id={tmp_path.name}"]
            said = CliRunner().invoke(app, options).output
            assert "is to move" in said or "not in the steps" in said, said
        run.until_said("rank 1 has moved from pid")
        (tmp_path / "go").touch()

    moved = train(tmp_path, "moved", steps=None, meanwhile=drain)
    (step, source) = moved.restored(1)[1]
    assert source == "predecessor", moved.errors
    assert moved.restored(1)[0] == (step, "live")
    steps = max(line["step"] for line in moved.events("trained"))
    assert all(moved.times(rank, n) == 1 for rank in (0, 1) for n in range(1, steps + 1))
    check_same(moved, train(tmp_path, "reference", steps=steps))
