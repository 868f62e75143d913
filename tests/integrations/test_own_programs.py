"""Programs of the frameworks' users: each fault costs no step, and changes no value.

A checkpoint is due after 100 steps, more than any of these runs make: what is restored is the state
that the ranks have, except after a stop.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.own_programs import check_same, run, waiting
from zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


def test_lightning(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("lightning", reason="make test-ports")
    faults = [
        *waiting(1, "step 6", "raise", for_other="step 6"),
        *waiting(1, "validation 0", "SIGKILL", for_other="validation 0"),
        *waiting(1, "batch_end 16", "raise", for_other="closed 16"),
        {"rank": 1, "at": "epoch 1", "do": "raise another"},
        {"rank": 0, "at": "validation 2", "do": "SIGTERM"},
        *waiting(0, "validation 3", "raise", for_other="validation 3"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "own_lightning")
    faulty = run(tmp_path / "faulty", "own_lightning", faults)
    steps = [step for step, _ in faulty.restored()]
    assert [*steps[:5], steps[-1]] == [0, 5, 8, 16, 16, 32], faulty.errors
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)


def test_trainer(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    faults = [
        *waiting(1, "step 6", "raise", for_other="step 6"),
        *waiting(1, "evaluation 8", "SIGKILL", for_other="evaluation 8"),
        *waiting(1, "stepped 16", "raise", for_other="epoch 16"),
        {"rank": 1, "at": "epoch 16", "do": "raise another"},
        {"rank": 0, "at": "evaluation 16", "do": "SIGTERM"},
        *waiting(0, "evaluation 24", "raise", for_other="evaluation 24"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "own_trainer")
    faulty = run(tmp_path / "faulty", "own_trainer", faults)
    steps = [step for step, _ in faulty.restored()]
    assert [*steps[:5], steps[-1]] == [0, 5, 8, 16, 16, 24], faulty.errors
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)


def test_accelerate(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("accelerate", reason="make test-ports")
    faults = [
        *waiting(1, "step 6", "raise", for_other="step 6"),
        *waiting(1, "evaluation 0", "SIGKILL", for_other="evaluation 0"),
        *waiting(1, "stepped 11", "raise", for_other="step 12"),
        {"rank": 0, "at": "evaluation 1", "do": "SIGTERM"},
        *waiting(0, "evaluation 2", "raise", for_other="evaluation 2"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "own_accelerate")
    faulty = run(tmp_path / "faulty", "own_accelerate", faults)
    steps = [step for step, _ in faulty.restored()]
    assert [*steps[:4], steps[-1]] == [0, 5, 8, 11, 24], faulty.errors
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)


def test_accelerate_at_another_world_size(tmp_path: Path, zygote: Zygote) -> None:
    """The scheduler makes as many steps as the optimizer, on any number of processes."""
    pytest.importorskip("accelerate", reason="make test-ports")
    stop = [{"rank": 0, "at": "step 12", "do": "SIGTERM"}]
    found = run(tmp_path / "c", "own_accelerate", stop, nprocs=1, then=2, resized=True)
    assert found.codes == [143, 0]
    assert found.values() == {(rank, "scheduler"): {"[32]"} for rank in (0, 1)}, found.errors
