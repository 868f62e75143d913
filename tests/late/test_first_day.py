"""What users of a GPU meet first (`tests/gpu/test_first_day.py`), on the device `late`.

Not the values of a sharded model: on `late` they may become NaN in torch's FSDP2 alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.exhaustive
def test_many_restarts(tmp_path: Path) -> None:
    out = first_day.run(tmp_path, "many_aborts", "40", ranks=1, env=LATE)
    assert "grown []" in out


def test_a_save_and_a_fault(tmp_path: Path) -> None:
    first_day.run(tmp_path, "saves", str(tmp_path / "c"), env=LATE)
