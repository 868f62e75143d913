"""The kinds of fault in a real job of two ranks: every loss and the final weights are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.chaos_job import Outcome, check_same, run

# Several restarts and replacements each: the net is for a very busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: object) -> Outcome:
    found = run(tmp_path_factory.mktemp("undisturbed") / "job", steps=STEPS)
    assert found.code == 0, found.output
    assert found.damaged == []
    return found


def fault(rank: int, kind: str, phase: str, step: int | None = None, **more: Any) -> dict[str, Any]:
    at = {} if step is None else {"step": step}
    return {"rank": rank, "kind": kind, "phase": phase, **at, **more}


DISK = [
    fault(0, "slow_disk", "writing", 1, seconds=0.5),
    fault(0, "disk_full", "writing", 3),
    fault(0, "disk_full", "committing", 7),
    fault(1, "torn_write", "writing", 11),
    fault(0, "flipped_byte", "committing", 13),
    fault(1, "flipped_byte", "writing", 15),
    fault(0, "torn_write", "committed", 15),
    fault(1, "sigkill", "step", 18),
    fault(0, "slow_disk", "committing", 19, seconds=0.5),
]
WRITER = [
    fault(0, "kill_writer", "writing", 3),
    fault(1, "kill_writer", "committing", 7),
    fault(1, "lost_shared_memory", "save", 11),
    fault(0, "lost_shared_memory", "step", 15),
    fault(1, "exception", "writing", 15),
    fault(1, "lost_shared_memory", "restore", 15),
    fault(1, "hang_python", "step", 19),
    fault(0, "hang_python", "collective", 21),
]
SYSTEM = [
    fault(0, "signal_storm", "step", 1),
    fault(0, "store_frozen", "committing", 3),
    fault(1, "exception", "collective", 7),
    fault(1, "signal_storm", "recovery"),
    fault(0, "store_frozen", "recovery"),
    fault(0, "sigkill", "recovery", iteration=1),
    fault(1, "sigstop", "save", 15, seconds=0.5),
    fault(1, "exception", "save", 17),
    fault(0, "segfault", "restore", 17),
]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(DISK, id="disk"),
        pytest.param(WRITER, id="writer", marks=pytest.mark.exhaustive),
        pytest.param(SYSTEM, id="system", marks=pytest.mark.exhaustive),
    ],
)
def test_the_result_is_that_of_a_job_without_faults(
    tmp_path: Path, undisturbed: Outcome, faults: list[dict[str, Any]]
) -> None:
    found = run(tmp_path / "job", faults, steps=STEPS)
    check_same(found, undisturbed)
    planned = {(f["kind"], f["phase"]) for f in faults}
    # A restart that keeps the state of the survivors restores nothing.
    assert {(kind, phase) for kind, phase in planned if phase != "restore"} <= set(found.fired)
    assert set(found.fired) <= planned
    assert found.valid[-1] == STEPS
