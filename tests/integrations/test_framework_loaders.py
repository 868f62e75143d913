"""The loaders that accelerate and Trainer make: faults and a stop within an epoch change no sample
and no loss, and another number of processes continues with the samples that are left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.own_programs import check_same, run, waiting
from integrations.test_own_loaders import FAULTS, check_exactly_once
from zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

SEEDED = ["trainer", "trainer workers", "trainer accumulated", "accelerate"]
SAMPLERS = [
    *("trainer group_by_length", "trainer group_by_length workers", "trainer batch_rebalance"),
    *("trainer own generator", "trainer own epochs"),
]
OTHERS = [
    "accelerate split",
    "accelerate generator",
    "accelerate stateful",
    "accelerate skip",
    "accelerate stream",
]
FEW = ["trainer workers", "accelerate stateful"]
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in FEW else MORE) for k in SEEDED + OTHERS]
)
def test_own(folder: Path, zygote: Zygote, kind: str) -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    undisturbed = run(folder / "u", "framework_loaders", kind=kind)
    check_exactly_once(undisturbed)
    faulty = run(folder / "f", "framework_loaders", FAULTS, kind=kind)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 5, faulty.restored()  # two beginnings, and after each fault
    check_same(faulty, undisturbed)
    check_exactly_once(faulty)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=MORE if k != SAMPLERS[0] else ()) for k in SAMPLERS]
)
def test_samplers_of_trainer(folder: Path, zygote: Zygote, kind: str) -> None:
    """An order that Trainer itself would draw anew, also after a fault between two epochs."""
    pytest.importorskip("transformers", reason="make test-ports")
    between = waiting(1, "step 9", "raise", for_other="step 9")
    faults = [*FAULTS[:-2], *between, *FAULTS[-2:]]
    undisturbed = run(folder / "u", "framework_loaders", kind=kind)
    check_exactly_once(undisturbed)
    faulty = run(folder / "f", "framework_loaders", faults, kind=kind)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 6, faulty.restored()  # two beginnings, and after each fault
    check_same(faulty, undisturbed)
    check_exactly_once(faulty)


@MORE
def test_own_stream_of_trainer(folder: Path, zygote: Zygote) -> None:
    """An `IterableDataset` in its first pass: Trainer does not know its length."""
    pytest.importorskip("transformers", reason="make test-ports")
    faults = [
        *waiting(1, "step 2", "raise", for_other="step 2"),
        {"rank": 0, "at": "step 3", "do": "SIGTERM, known"},
    ]
    undisturbed = run(folder / "u", "framework_loaders", kind="trainer stream")
    faulty = run(folder / "f", "framework_loaders", faults, kind="trainer stream")
    assert faulty.codes == [143, 0]
    check_same(faulty, undisturbed)
    check_exactly_once(faulty, epochs=1)


@pytest.mark.parametrize(
    ("kind", "nprocs", "then"),
    [
        *(pytest.param(kind, 2, 1, marks=() if "accumulated" in kind else MORE) for kind in SEEDED),
        pytest.param("trainer", 1, 3, marks=MORE),
    ],
)
def test_resized(folder: Path, zygote: Zygote, kind: str, nprocs: int, then: int) -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    stop = [{"rank": 0, "at": "step 6", "do": "SIGTERM, known"}]
    sizes = {"nprocs": nprocs, "then": then}
    found = run(folder / "f", "framework_loaders", stop, kind=kind, resized=True, **sizes)
    assert found.codes == [143, 0]
    check_exactly_once(found)
