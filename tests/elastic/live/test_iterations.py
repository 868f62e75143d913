"""What stands behind `job.step()` in the loop's body, and the functions of a step, through faults,
kills and stops: every loss, evaluation and weight is that of a run without them, or the log says
which step's rest was not run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, fault, ranks_of, run
from procs import Job

pytestmark = pytest.mark.slow

Ranks = Callable[..., Job]
SCRIPT = Path(__file__).parents[1] / "scripts" / "iterations.py"
KINDS = {
    "body": {"where": "body"},
    "functions": {"where": "functions"},
    "plain": {"where": "plain"},
    "sharded": {"where": "functions", "kind": "fsdp"},
    "sharded body": {"where": "body", "kind": "fsdp"},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Callable[[str], Run]:
    """The run of a kind without faults."""
    found: dict[str, Run] = {}

    def undisturbed(kind: str) -> Run:
        if kind not in found:
            folder = tmp_path_factory.mktemp("reference")
            ranks = ranks_of(folder, SCRIPT, zygote)
            found[kind] = run(ranks, folder / "checkpoints", script="iterations", **KINDS[kind])
        return found[kind]

    return undisturbed


def said(lines: Run) -> dict[tuple[str, int, int], set[str]]:
    """All losses and evaluations of each rank and step: one, however often they were made."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for event in ("trained", "evaluated"):
        for line in lines.events(event):
            found.setdefault((event, line["of"], line["step"]), set()).add(line["loss"])
    return found


def together(rank: int, at: str, do: str, **more: Any) -> list[dict[str, Any]]:
    """A fault of `rank` at this point, when the other rank is there, too."""
    other = fault(1 - rank, at, f"mark {at} of {1 - rank}", **more)
    return [other, fault(rank, at, f"await {at} of {1 - rank}, {do}", **more)]


def ahead(rank: int, at: str, do: str, other_at: str) -> list[dict[str, Any]]:
    """A fault of `rank` at this point, when the other rank has come to a later one."""
    mark = f"{other_at} of {1 - rank}"
    return [fault(1 - rank, other_at, f"mark {mark}"), fault(rank, at, f"await {mark}, {do}")]


@pytest.mark.parametrize(
    ("kind", "faults", "restored"),
    [
        (
            "body",
            [
                *together(1, "forward 3", "raise", iteration=0),
                *together(0, "forward 7", "SIGKILL", iteration=1),
            ],
            [(2, "live"), (6, "live")],
        ),
        (
            "functions",  # one rank has ended the step's function, the other one has not
            [
                *ahead(1, "evaluating 2", "raise", "evaluating 2"),
                *ahead(0, "evaluating 4", "SIGKILL", "evaluating 4"),
                *ahead(1, "rest 7", "raise another", "forward 8"),
            ],
            [(2, "live"), (4, "live"), (7, "live")],
        ),
        # One rank has begun the save that it wants.
        ("functions", ahead(1, "keeping 6", "raise", "forward 7"), [(6, "live")]),
        ("functions", ahead(0, "keeping 6", "SIGKILL", "forward 7"), [(6, "live")]),
        ("sharded", [fault(1, "evaluating 6", "SIGKILL")], [(4, "storage")]),
        ("sharded body", [fault(1, "forward 6", "SIGKILL")], [(4, "storage")]),
    ],
)
def test_faults_between_two_steps(
    ranks: Ranks,
    tmp_path: Path,
    reference: Callable[[str], Run],
    kind: str,
    faults: list[dict[str, Any]],
    restored: list[tuple[int, str]],
) -> None:
    faulty = run(ranks, tmp_path / "faulty", *faults, script="iterations", **KINDS[kind])
    for iteration, (step, source) in enumerate(restored, 1):
        found = set(faulty.restored(iteration).values())
        assert {step} == {each for each, _ in found}, faulty.errors
        assert source in {each for _, each in found} or source == "storage", faulty.errors
    assert said(faulty) == said(reference(kind)), faulty.errors
    assert faulty.ended() == reference(kind).ended(), faulty.errors


def test_a_rest_that_some_ranks_have_not_run_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 has come back for the next batch, rank 1 has not: all go on with what both have."""
    faults = ahead(1, "rest 3", "raise", "forward 4")
    faulty = run(ranks, tmp_path / "faulty", *faults, script="iterations", where="body")
    assert set(faulty.restored().values()) == {(3, "live")}
    lines = SCRIPT.read_text().splitlines()
    *_, number = (n for n, text in enumerate(lines, 1) if text.strip() == "job.step()")
    place = f"what stands after job.step() at iterations.py:{number} was not run for step 3"
    assert faulty.errors.count(place) == 1
    assert len({each.partition(" ")[0] for each in faulty.ended().values()}) == 1


@pytest.mark.parametrize("kind", ["body", "functions", "plain"])
def test_a_stop_waits_for_the_end_of_the_iteration(
    ranks: Ranks, tmp_path: Path, reference: Callable[[str], Run], kind: str
) -> None:
    """A signal in the evaluation of a step; then the same command again."""
    stop = fault(1, "evaluating 4", "SIGTERM, known")
    plan = json.dumps({"path": str(tmp_path / "checkpoints"), "faults": [stop], **KINDS[kind]})
    lines, errors = [], ""
    for code in (143, 0):
        with ranks("iterations", plan, nprocs=2) as job:
            job.start_all()
            assert job.wait_all() == {0: code, 1: code}, job.errors(0)
            lines += [line for rank in range(2) for line in job.lines(rank)]
            errors += job.errors(0)
    whole = Run(lines, errors)
    assert said(whole) == said(reference(kind)), errors
    assert whole.ended() == reference(kind).ended(), errors
    assert "was not run" not in errors or kind == "plain"
