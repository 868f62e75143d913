"""Pipeline stages, tensor parallelism and FSDP2 together survive faults, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.runs import Run
from outlast import Checkpointer
from zygote import Zygote

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel_3d.py"
STEPS = 30
# Ranks 0 and 1 are the first stage, 2 and 3 the last. Steps count from the start of an iteration.
FAULTS = [
    {"rank": 1, "iteration": 0, "step": 8, "kind": "exception"},
    {"rank": 2, "iteration": 1, "step": 7, "kind": "sigkill"},
    {"rank": 1, "iteration": 2, "step": 13, "kind": "hang"},
    {"rank": 0, "iteration": 3, "step": 3, "kind": "sigkill"},  # serves the iteration's store
]
LINE = re.compile(r"^\[(\d)\] step (\d+): loss (\S+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parallel_dimensions_survive_faults_bit_by_bit(tmp_path: Path, zygote: Zygote) -> None:
    undisturbed = train(tmp_path / "undisturbed", [])
    assert set(undisturbed) == {(rank, step) for rank in (2, 3) for step in range(1, STEPS + 1)}

    disturbed = train(tmp_path / "disturbed", FAULTS)
    assert disturbed == undisturbed, "every pass over a step has the same loss"

    expected = final_state(tmp_path / "undisturbed")
    found = final_state(tmp_path / "disturbed")
    assert {"embedding.weight", "layers.0.up.weight", "layers.3.up.weight"} <= set(
        expected["model"]
    ), "one checkpoint of the whole model"
    assert expected["model"].keys() == found["model"].keys()
    assert expected["optimizer"].keys() == found["optimizer"].keys()
    differing = [
        name
        for part in ("model", "optimizer")
        for name, value in expected[part].items()
        if not same(value, found[part][name])
    ]
    assert not differing


def train(folder: Path, faults: list[dict[str, Any]]) -> dict[tuple[int, int], set[str]]:
    """The losses of a run by rank and step: all values that were printed, one per pass."""
    folder.mkdir()
    options = ["--nproc-per-node=4", "--max-restarts=8"]
    if faults:
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"faults": faults}))
        options.append(f"--chaos={plan}")
    arguments = ["--steps", str(STEPS), "--save-every=5", "--state", str(folder / "state")]
    with Run(folder, EXAMPLE.read_text(), *options, args=arguments) as run:
        for number, fault in enumerate(faults):
            run.until_said(f"fires {fault['kind']} at iteration {number}")
        assert run.wait() == 0, run.err[-10_000:]
        losses: dict[tuple[int, int], set[str]] = {}
        for rank, step, value in LINE.findall(run.out):
            losses.setdefault((int(rank), int(step)), set()).add(value)
        return losses


def final_state(folder: Path) -> dict[str, Any]:
    """Model and optimizer at the end, loaded by one process."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    with Checkpointer(folder / "state") as checkpointer:
        assert checkpointer.restore(state) == STEPS
    return state


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
