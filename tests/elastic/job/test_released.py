"""What an iteration used is released at the restart, not when Python next collects cycles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job


@pytest.mark.slow
def test_restarts_leave_no_reference_cycles(ranks: Callable[..., Job], tmp_path: Path) -> None:
    with ranks("released", str(tmp_path / "c")) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
        for rank in (0, 1):
            (line,) = [line for line in job.lines(rank) if line.get("event") == "released"]
            assert line["models"] <= 1  # from which the next iteration continues
            assert line["after"] <= line["before"] + 4
