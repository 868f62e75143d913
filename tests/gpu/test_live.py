"""Trainings on a GPU continue from the survivors after a fault, bit by bit: two ranks on one GPU by
gloo, or by NCCL with a GPU for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.live_trainings import Run, later, ranks_of, run
from late.trainings import ahead, check

SCRIPT = Path(__file__).parents[1] / "late" / "scripts" / "live.py"
ONE = {"device": "cuda", "backend": "gloo"}
TWO = {"device": "cuda", "backend": "nccl"}
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and there are not two"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.parametrize("place", [ONE, pytest.param(TWO, marks=two_gpus)], ids=["one", "two"]),
]


def trained(tmp_path: Path, zygote: Any, *faults: dict[str, Any], **plan: Any) -> tuple[Run, Run]:
    """The run with these faults, and the one without."""
    ranks = ranks_of(tmp_path, SCRIPT, zygote)
    reference = run(ranks, tmp_path / "reference", **plan)
    return run(ranks, tmp_path / "faulty", *faults, **plan), reference


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize(
    ("at", "steps"), [("forward 5", [4]), ("computed 5", [4, 5]), ("stepped 5", [5])]
)
def test_no_step_is_lost(
    tmp_path: Path, zygote: Any, place: dict[str, Any], at: str, steps: list[int], do: str
) -> None:
    faults = later(1, steps[0], at, do)
    check(*trained(tmp_path, zygote, *faults, **place), *steps)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_the_other_host_is_ahead_of_gradients_that_never_come(
    tmp_path: Path, zygote: Any, place: dict[str, Any], options: dict[str, Any]
) -> None:
    if place["backend"] == "gloo":
        pytest.skip("the host itself waits for a collective of gloo")
    plan = {**place, "optimizer": options}
    found, reference = trained(tmp_path, zygote, *ahead("forward 5", "raise"), **plan)
    check(found, reference, 4, sources=("live",))
