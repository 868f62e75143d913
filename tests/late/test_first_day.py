"""What users of a GPU meet first (`tests/gpu/test_first_day.py`), on the device `late`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from gpu import first_day

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("zygote")]
LATE = {"DEVICE": "late"}


@pytest.mark.parametrize(
    "scenario",
    [
        ("before_the_first_collective",),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                ("in_a_collective", "raise"),
                ("in_a_collective", "finally"),
                ("in_a_subgroup",),
                ("between_pairs",),
                ("sharded",),
            )
        ),
    ],
    ids=" ".join,
)
def test_an_exception(tmp_path: Path, scenario: tuple[str, ...]) -> None:
    first_day.run(tmp_path, *scenario, env=LATE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", [("in_a_collective", "kill"), ("with_workers",)], ids=" ".join)
def test_a_kill(tmp_path: Path, scenario: tuple[str, ...]) -> None:
    first_day.run(tmp_path, *scenario, replaced=1, env=LATE)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="`symmetric.cpp` needs it")
@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.exhaustive)])
def test_symmetric_memory(tmp_path: Path, how: str) -> None:
    """Each process that has used it leaves at the restart. Its replacement does not count: there
    are more than `--max-restarts` allows.
    """
    replaced = int(how == "kill")
    out = first_day.run(tmp_path, "in_symmetric_memory", how, ranks=4, replaced=replaced, env=LATE)
    assert len(set(re.findall(r"meets in pid (\d+)", out))) == 8, out


@pytest.mark.exhaustive
def test_many_restarts(tmp_path: Path) -> None:
    out = first_day.run(tmp_path, "many_aborts", "40", ranks=1, env=LATE)
    assert "grown []" in out


def test_a_save_and_a_fault(tmp_path: Path) -> None:
    first_day.run(tmp_path, "saves", str(tmp_path / "c"), env=LATE)
