"""TensorBoard's event files after faults, as TensorBoard reads them: each step once."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.own_programs import Fault, check_same, run, waiting
from zygote import Zygote

pytest.importorskip("tensorboard", reason="make test-ports")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

Rows = dict[str, list[tuple[int, float]]]


def rows(folder: Path) -> Rows:
    """The steps and values of each scalar, without what was purged."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


def test_a_loop_of_the_program(tmp_path: Path, zygote: Zygote) -> None:
    faults = [
        *waiting(1, "logged 5", "raise", for_other="logged 5"),
        *waiting(0, "logged 10", "SIGKILL", for_other="logged 10"),
        *waiting(1, "logged 15", "SIGKILL", for_other="logged 15"),
        {"rank": 0, "at": "logged 18", "do": "SIGTERM, known"},
        *waiting(1, "logged 22", "raise another", for_other="logged 22"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "tensorboard_loop")
    faulty = run(tmp_path / "faulty", "tensorboard_loop", faults)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 6, faulty.restored()
    check_same(faulty, undisturbed)
    expected = rows(tmp_path / "undisturbed" / "state-runs")
    assert [step for step, _ in expected["loss"]] == [*range(1, 25)]
    assert rows(tmp_path / "faulty" / "state-runs") == expected


def test_lightning(tmp_path: Path, zygote: Zygote) -> None:
    """One version of the logs, which is also the folder of the best checkpoints."""
    pytest.importorskip("lightning", reason="make test-ports")
    faults = [
        *waiting(1, "step 4", "raise", for_other="step 4"),
        *_kill_all("step 8"),
        *waiting(0, "validation 2", "raise another", for_other="validation 2"),
        {"rank": 0, "at": "step 18", "do": "SIGTERM"},
        *waiting(0, "step 23", "raise", for_other="step 23"),
    ]
    # Short names: the sockets of DataLoader workers are in there.
    undisturbed = run(tmp_path / "u", "own_lightning_files", tensorboard=True)
    faulty = run(tmp_path / "f", "own_lightning_files", faults, tensorboard=True)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 6, faulty.restored()
    assert faulty.restored().count((0, "memory")) == 1, faulty.restored()
    check_same(faulty, undisturbed)
    expected, found = (tmp_path / each / "state-logs" / "lightning_logs" for each in "uf")
    assert [each.name for each in found.iterdir()] == ["version_0"]
    checkpoints = {each.name for each in expected.glob("version_0/checkpoints/*")}
    assert {each.name for each in found.glob("version_0/checkpoints/*")} == checkpoints
    assert rows(found / "version_0") == rows(expected / "version_0")


def test_trainer(tmp_path: Path, zygote: Zygote) -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    faults = [
        *waiting(1, "step 6", "raise", for_other="step 6"),
        *waiting(1, "evaluation 8", "SIGKILL", for_other="evaluation 8"),
        *_kill_all("step 11"),
        {"rank": 0, "at": "evaluation 16", "do": "SIGTERM"},
        *waiting(0, "step 26", "raise", for_other="step 26"),
    ]
    undisturbed = run(tmp_path / "undisturbed", "own_trainer", report_to=["tensorboard"])
    faulty = run(tmp_path / "faulty", "own_trainer", faults, report_to=["tensorboard"])
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 6, faulty.restored()
    assert faulty.restored().count((0, "memory")) == 1, faulty.restored()
    check_same(faulty, undisturbed)
    expected, found = (rows(tmp_path / each / "state-runs") for each in ("undisturbed", "faulty"))
    assert {name: found[name] for name in expected if _is_equal(name)} == {
        name: expected[name] for name in expected if _is_equal(name)
    }


def _kill_all(at: str) -> list[Fault]:
    """Both ranks are killed at this point: all steps from the first one are made again."""
    return [
        {"rank": 1, "at": at, "do": "mark other, stay"},
        {"rank": 0, "at": at, "do": "await other, kill other, SIGKILL"},
    ]


def _is_equal(name: str) -> bool:
    """Whether it is no duration."""
    return "runtime" not in name and "per_second" not in name
