"""Pipeline stages, tensor parallelism and FSDP2 together survive faults, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.faulty_runs import losses_of
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
ARGUMENTS = ["--steps", str(STEPS), "--save-every=5", "--state", "state"]


@pytest.mark.slow
def test_all_parallel_dimensions_survive_faults_bit_by_bit(tmp_path: Path, zygote: Zygote) -> None:
    undisturbed = losses_of(tmp_path / "undisturbed", EXAMPLE, ARGUMENTS, nprocs=4)
    assert set(undisturbed) == {(rank, step) for rank in (2, 3) for step in range(1, STEPS + 1)}

    disturbed = losses_of(tmp_path / "disturbed", EXAMPLE, ARGUMENTS, nprocs=4, faults=FAULTS)
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


def final_state(folder: Path) -> dict[str, Any]:
    """Model and optimizer at the end, loaded by one process."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    with Checkpointer(folder / "state") as checkpointer:
        assert checkpointer.restore(state) == STEPS
    return state


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
