"""A training with quantized weights and 8-bit moments continues from a checkpoint, and after a
fault from the state of a survivor, bit by bit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from elastic.live_trainings import Ranks, check_same, later, run

SLOW = pytest.mark.slow
TORCHAO = pytest.param(
    "torchao",
    marks=[
        SLOW,
        pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    ],
)
KINDS = pytest.mark.parametrize("kind", [pytest.param("own", marks=SLOW), TORCHAO])


@KINDS
def test_another_run_continues_from_the_checkpoint(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    whole = run(ranks, tmp_path / "whole", script="quantized", kind=kind)
    run(ranks, tmp_path / "c", script="quantized", kind=kind, stop=4)
    second = run(ranks, tmp_path / "c", script="quantized", kind=kind)
    assert second.restored(0) == {0: (4, "storage"), 1: (4, "storage")}
    assert second.ended() == whole.ended(), second.errors


@KINDS
@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
def test_after_a_fault_no_step_is_lost(ranks: Ranks, tmp_path: Path, kind: str, do: str) -> None:
    whole = run(ranks, tmp_path / "whole", script="quantized", kind=kind)
    faults = later(1, 6, "done 6", do)
    faulty = run(ranks, tmp_path / "c", *faults, script="quantized", kind=kind)
    source = "live" if do == "raise" else "replica"
    assert faulty.restored() == {0: (6, "live"), 1: (6, source)}, faulty.errors
    check_same(faulty, whole)
