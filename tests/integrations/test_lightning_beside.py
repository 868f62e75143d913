"""What the page about Lightning says of loggers, ModelCheckpoint and data modules."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from integrations.own_programs import SCRIPTS
from launch.runs import Run
from zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


def run(folder: Path, fault: str) -> list[list[int]]:
    """Runs the script; returns the steps of the losses in each file of the logger."""
    folder.mkdir()
    source = (SCRIPTS / "lightning_beside.py").read_text()
    with Run(folder, source, "--nproc-per-node=2", args=[str(folder), fault]) as job:
        assert job.wait(300.0) == 0, job.err[-10_000:]
    files = sorted((folder / "lightning_logs").glob("version_*/metrics.csv"))
    rows = [list(csv.DictReader(file.read_text().splitlines())) for file in files]
    return [[int(row["step"]) for row in each if row["loss"]] for each in rows]


def test_the_logs_follow_one_another_and_the_best_of_the_whole_fit_are_kept(
    tmp_path: Path, zygote: Zygote
) -> None:
    pytest.importorskip("lightning", reason="make test-ports")
    (undisturbed,) = run(tmp_path / "undisturbed", "none")
    before, after = run(tmp_path / "faulty", "fault")
    assert before + after == undisturbed == list(range(20))
    best = [
        {path.name for path in tmp_path.glob(f"{each}/best/*")}
        for each in ("undisturbed", "faulty")
    ]
    assert best[0] == best[1]
    assert len(best[0]) == 2
