"""After a fault, a log ends at the restored step, and no rank loses a state that it alone has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, Run, fault, later, ranks_of, run

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> tuple[str, Run]:
    """The rows, and what a run without a fault has said."""
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "logs.py"
    log = folder / "log.csv"
    done = run(ranks_of(folder, script, zygote), folder / "checkpoints", log=str(log))
    found = log.read_text()
    assert [row.split(",")[0] for row in found.splitlines()] == ["step", *map(str, range(1, 13))]
    return found, done


def totals(done: Run) -> set[tuple[int, str]]:
    """The sums over an epoch's batches, of each rank."""
    return {(line["of"], line["total"]) for line in done.events("epoch")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "at", "do", "rows", "source"),
    [
        (0, "forward 7", "SIGKILL", "before", {0: (6, "replica"), 1: (6, "live")}),
        pytest.param(
            *(0, "forward 7", "SIGKILL", "after", {0: (6, "replica"), 1: (6, "live")}), marks=SLOW
        ),
        pytest.param(
            *(1, "forward 7", "raise", "before", {0: (6, "live"), 1: (6, "live")}), marks=SLOW
        ),
        pytest.param(
            *(1, "forward 7", "SIGKILL", "before", {0: (6, "live"), 1: (6, "replica")}), marks=SLOW
        ),
    ],
)
def test_a_log_has_each_row_once(
    ranks: Ranks,
    tmp_path: Path,
    reference: tuple[str, Run],
    rank: int,
    at: str,
    do: str,
    rows: str,
    source: dict[int, tuple[int, str]],
) -> None:
    log = tmp_path / "log.csv"
    faults = later(rank, 6, at, do)
    done = run(ranks, tmp_path / "c", *faults, script="logs", log=str(log), rows=rows)
    restored = done.events("restored")
    assert {line["of"]: (line["step"], line["source"]) for line in restored} == source
    assert log.read_text() == reference[0], done.errors
    assert totals(done) == totals(reference[1])


@pytest.mark.parametrize("do", ["SIGKILL", pytest.param("raise", marks=SLOW)])
def test_a_row_that_only_rank_0_knows_of_is_not_missing(
    ranks: Ranks, tmp_path: Path, reference: tuple[str, Run], do: str
) -> None:
    """Rank 1 completes step 7, and rank 0 has written its row, but not completed the step."""
    log = tmp_path / "log.csv"
    faults = fault(1, "done 7", "mark done"), fault(0, "stepped 7", f"await done, {do}")
    done = run(ranks, tmp_path / "c", *faults, script="logs", log=str(log))
    # What follows rank 0's early note is not known: the checkpoint of step 4 is.
    assert {line["step"] for line in done.events("restored") if line["step"]} == {4}
    assert log.read_text() == reference[0], done.errors
    assert totals(done) == totals(reference[1])


def test_rows_of_rank_0_cost_no_step_when_another_rank_is_killed(
    ranks: Ranks, tmp_path: Path, reference: tuple[str, Run]
) -> None:
    """Rank 0 completes step 7 with a row in it, and rank 1 is killed before it completes it."""
    log = tmp_path / "log.csv"
    faults = fault(0, "done 7", "mark done"), fault(1, "stepped 7", "await done, SIGKILL")
    done = run(ranks, tmp_path / "c", *faults, script="logs", log=str(log), sums="before")
    restored = {(line["of"], line["step"], line["source"]) for line in done.events("restored")}
    assert {(0, 7, "live"), (1, 7, "replica")} <= restored, done.errors
    assert log.read_text() == reference[0], done.errors
    assert totals(done) == totals(reference[1])


@pytest.mark.slow
def test_another_number_of_ranks_and_a_new_job_keep_the_rows(
    ranks: Ranks, tmp_path: Path, reference: tuple[str, Run]
) -> None:
    log = tmp_path / "log.csv"
    # One rank kills both: no survivor has a state in memory.
    stop = (
        fault(1, "done 5", "mark done, stay"),
        fault(0, "done 5", "await done, kill done, SIGKILL"),
    )
    plan: dict[str, Any] = {"log": str(log), "job": {"linger": 0}}
    run(ranks, tmp_path / "c", *stop, script="logs", replace=False, **plan)
    with log.open("a") as file:
        file.write("6,torn")
    done = run(ranks, tmp_path / "c", script="logs", log=str(log))
    assert {(line["step"], line["source"]) for line in done.events("restored")} == {(4, "storage")}
    assert log.read_text() == reference[0], done.errors
    assert totals(done) == totals(reference[1])
    alone = run(ranks, tmp_path / "c", script="logs", log=str(log), nprocs=1)
    assert [line["step"] for line in alone.events("restored")] == [12]
    assert log.read_text() == reference[0], alone.errors


def test_a_state_that_rank_0_alone_has_is_not_lost_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    plan = {"path": str(tmp_path / "c"), "log": str(tmp_path / "log"), "best": "rank 0"}
    faults = later(0, 6, "forward 7", "SIGKILL")
    with ranks("logs", json.dumps({**plan, "faults": faults}), nprocs=2) as job:
        job.start_all()
        assert job.wait(0) == -9
        job.start(0, env={"OUTLAST_REPLACEMENT": "1"})
        codes = job.wait_all()
        errors = [job.errors(rank) for rank in range(2)]
    assert 0 not in codes.values(), errors
    values = "['value'] is 1.25 on rank 0, and inf on rank 1"
    warnings = "".join(errors).count(f"states['best'] differs between ranks: {values}, at step 4.")
    assert warnings == 1, errors
    for text in errors:
        assert f"RestartAbort: states['best'] differs between ranks: {values}, at step 6" in text
        assert "states={'best': outlast.per_rank(...)}" in text


@pytest.mark.parametrize("every", [4, pytest.param(None, marks=SLOW)])
def test_a_state_of_each_rank_is_given_back(
    ranks: Ranks, tmp_path: Path, every: int | None
) -> None:
    faults = later(0, 6, "forward 7", "SIGKILL")
    plan: dict[str, Any] = {"log": str(tmp_path / "log"), "best": "own", "every": every}
    done = run(ranks, tmp_path / "c", *faults, script="logs", **plan)
    assert "differs between ranks" not in done.errors
    assert [(line["of"], line["best"]) for line in done.events("ended")] == [
        (0, 1.25),
        (1, float("inf")),
    ]
