"""Loaders of torch and torchdata: over restarts in place, stops and changes of size, each sample is
trained on exactly once in each epoch.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from integrations.own_programs import Result, check_same, run, waiting
from zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
MORE = pytest.mark.exhaustive

EPOCHS, SAMPLES, STEPS = 3, 48, 4  # as in the script; steps of an epoch
FAULTS = [
    *waiting(1, "step 3", "raise", for_other="step 3"),
    *waiting(0, "step 6", "SIGKILL", for_other="step 6"),
    {"rank": 0, "at": "step 7", "do": "SIGTERM, known"},
    *waiting(1, "step 11", "raise another", for_other="step 11"),
]


def by_epoch(result: Result, epochs: int) -> list[list[set[int]]]:
    """The samples of each step of each epoch. A step has the same ones each time it is made."""
    found: list[list[set[int]]] = []
    values = result.values()
    for step in range(1, epochs * STEPS + 1):
        ranks = [told for (_, name), told in values.items() if name == f"step {step}"]
        assert all(len(told) == 1 for told in ranks), (step, ranks)
        shares = [ast.literal_eval(each) for told in ranks for each in told]
        (epoch,) = {share[0] for share in shares}
        samples = [number for share in shares for number in share[1]]
        assert len(set(samples)) == len(samples)
        if epoch == len(found):
            found.append([])
        found[epoch].append(set(samples))
    return found


def check_exactly_once(result: Result, epochs: int = EPOCHS) -> None:
    for steps in by_epoch(result, epochs):
        assert len(steps) == STEPS
        assert set().union(*steps) == set(range(SAMPLES))


@pytest.mark.parametrize(
    "kind",
    [
        "persistent",
        "stateful",
        *(pytest.param(kind, marks=MORE) for kind in ("outside", "stream", "stream workers")),
        pytest.param("stream kept", marks=MORE),
    ],
)
def test_own(folder: Path, zygote: Zygote, kind: str) -> None:
    undisturbed = run(folder / "u", "own_loaders", kind=kind)
    check_exactly_once(undisturbed)
    faulty = run(folder / "f", "own_loaders", FAULTS, kind=kind)
    assert faulty.codes == [143, 0]
    assert len(faulty.restored()) == 5, faulty.restored()  # two beginnings, and after each fault
    check_same(faulty, undisturbed)
    check_exactly_once(faulty)


@pytest.mark.parametrize("then", [1, pytest.param(3, marks=MORE)])
def test_resized(folder: Path, zygote: Zygote, then: int) -> None:
    stop = [{"rank": 0, "at": "step 6", "do": "SIGTERM, known"}]
    found = run(folder / "f", "own_loaders", stop, then=then, kind="persistent")
    assert found.codes == [143, 0]
    check_exactly_once(found)
