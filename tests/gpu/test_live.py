"""Trainings on a GPU continue from the survivors after a fault, bit by bit: two ranks by NCCL, on
one GPU or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, later, ranks_of, run
from late.trainings import ahead, check

SCRIPT = Path(__file__).parents[1] / "late" / "scripts" / "live.py"
NCCL = {"device": "cuda", "backend": "nccl"}
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(ranks_of(folder, SCRIPT, zygote), folder / "checkpoints", **NCCL)


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize(
    ("at", "steps"), [("forward 5", [4]), ("computed 5", [4, 5]), ("stepped 5", [5])]
)
def test_no_step_is_lost(
    tmp_path: Path, zygote: Any, undisturbed: Run, at: str, steps: list[int], do: str
) -> None:
    ranks = ranks_of(tmp_path, SCRIPT, zygote)
    found = run(ranks, tmp_path / "faulty", *later(1, steps[0], at, do), **NCCL)
    check(found, undisturbed, *steps)


def test_no_step_is_lost_with_gloo(tmp_path: Path, zygote: Any) -> None:
    ranks, gloo = ranks_of(tmp_path, SCRIPT, zygote), {**NCCL, "backend": "gloo"}
    reference = run(ranks, tmp_path / "reference", **gloo)
    found = run(ranks, tmp_path / "faulty", *later(1, 4, "computed 5", "SIGKILL"), **gloo)
    check(found, reference, 4, 5)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_the_other_host_is_ahead_of_gradients_that_never_come(
    tmp_path: Path, zygote: Any, options: dict[str, Any]
) -> None:
    ranks, plan = ranks_of(tmp_path, SCRIPT, zygote), {**NCCL, "optimizer": options}
    reference = run(ranks, tmp_path / "reference", **plan)
    found = run(ranks, tmp_path / "faulty", *ahead("forward 5", "raise"), **plan)
    check(found, reference, 4, sources=("live",))
