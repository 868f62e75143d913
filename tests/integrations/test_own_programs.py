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


@pytest.mark.parametrize(
    "kind",
    ["averaging", "swa", "hooks", "finetuning", "finetuning a backbone", "epochs"],
)
def test_lightning_callbacks(tmp_path: Path, zygote: Zygote, kind: str) -> None:
    """What callbacks and hooks save comes back, and so does what they do at an epoch's begin."""
    pytest.importorskip("lightning", reason="make test-ports")
    faults = [
        *waiting(1, "batch 6", "raise", for_other="batch 6"),
        *waiting(1, "batch 15", "SIGKILL", for_other="batch 15"),
        *waiting(0, "batch 21", "SIGKILL", for_other="batch 21"),
        {"rank": 0, "at": "batch 28", "do": "SIGTERM, known"},
        *waiting(1, "batch 36", "raise another", for_other="batch 36"),
    ]
    if kind == "swa":  # in the additional epoch for batch norms
        faults += waiting(0, "batch 45", "raise", for_other="batch 45")
    undisturbed = run(tmp_path / "u", "own_lightning_callbacks", kind=kind)
    faulty = run(tmp_path / "f", "own_lightning_callbacks", faults, kind=kind)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 6 + (kind == "swa"), faulty.restored()
    check_same(faulty, undisturbed)


@pytest.mark.exhaustive
def test_lightning_files(tmp_path: Path, zygote: Zygote) -> None:
    """One version of the logs, with each row once; the best checkpoints, and no others; each sample
    once, with the same random numbers in the workers.
    """
    pytest.importorskip("lightning", reason="make test-ports")
    faults = [
        *waiting(1, "step 4", "raise", for_other="step 4"),
        *waiting(0, "step 8", "SIGKILL", for_other="step 8"),
        *waiting(0, "validation 2", "raise another", for_other="validation 2"),
        {"rank": 0, "at": "step 18", "do": "SIGTERM"},
        *waiting(1, "epoch 3", "raise", for_other="epoch 3"),
    ]
    # Short names: the sockets of DataLoader workers are in there.
    undisturbed = run(tmp_path / "u", "own_lightning_files")
    faulty = run(tmp_path / "f", "own_lightning_files", faults)
    steps = [step for step, _ in faulty.restored()]
    assert [*steps[:4], steps[-1]] == [0, 3, 7, 15, 20], faulty.errors
    assert "your dataloader is not resumable" not in faulty.errors
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)
    expected, found = (_files(tmp_path / each) for each in "uf")
    assert found == expected
    assert len([name for name in found if name.endswith(".ckpt")]) == 2


def _files(folder: Path) -> dict[str, str]:
    """The files of the logs, with the text of those that are text."""
    return {
        str(each.relative_to(folder)): each.read_text() if each.suffix == ".csv" else ""
        for each in folder.glob("state-logs/**/*")
        if not each.name.startswith(".")
    }


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


def test_trainer_that_is_stopped_when_it_restores(tmp_path: Path, zygote: Zygote) -> None:
    """What its callbacks and control have to do after the step is in that checkpoint, too."""
    pytest.importorskip("transformers", reason="make test-ports")
    faults = waiting(0, "evaluation 24", "SIGTERM, known, raise", for_other="evaluation 24")
    undisturbed = run(tmp_path / "undisturbed", "own_trainer")
    faulty = run(tmp_path / "faulty", "own_trainer", faults)
    assert [step for step, _ in faulty.restored()] == [0, 24], faulty.errors
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)


@pytest.mark.exhaustive
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


def test_fabric(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("lightning", reason="make test-ports")
    faults = [
        *waiting(1, "step 6", "raise", for_other="step 6"),
        *waiting(0, "step 14", "SIGKILL", for_other="step 14"),
        {"rank": 1, "at": "stepped 17", "do": "SIGTERM, known"},
        *waiting(1, "step 20", "raise another", for_other="step 20"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "own_fabric")
    faulty = run(tmp_path / "faulty", "own_fabric", faults)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 5, faulty.restored()
    check_same(faulty, undisturbed)


def test_accelerate_at_another_world_size(tmp_path: Path, zygote: Zygote) -> None:
    """The scheduler makes as many steps as the optimizer, on any number of processes."""
    pytest.importorskip("accelerate", reason="make test-ports")
    stop = [{"rank": 0, "at": "step 12", "do": "SIGTERM"}]
    found = run(tmp_path / "c", "own_accelerate", stop, nprocs=1, then=2, resized=True)
    assert found.codes == [143, 0]
    assert found.values() == {(rank, "scheduler"): {"[32]"} for rank in (0, 1)}, found.errors
