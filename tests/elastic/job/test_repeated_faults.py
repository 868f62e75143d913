"""Steps that a `Job` repeats after a restore are no progress between equal faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from procs import Job


def test_equal_faults_before_the_furthest_step_end_the_job(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    # Every iteration makes more pings than none, and no step beyond the seventh.
    with ranks("redone", str(tmp_path / "checkpoints"), "16", "[8, 7, 8, 9, 10]") as job:
        job.start_all()
        assert job.wait_all() == {0: 93, 1: 93}, [job.errors(rank) for rank in range(2)]
        assert "3 equal faults without progress in between" in job.errors(1)
        assert "RuntimeError: a planned exception" in job.errors(1)
        assert not any(line["event"] == "ended" for line in job.lines(0))


def test_a_fault_after_a_step_without_job_epochs_is_named(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    with ranks("redone", str(tmp_path / "checkpoints"), "8", "[6, 8]", "live") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0)
        said = [line for line in job.errors(0).splitlines() if "the fault came after" in line]
        assert len(said) == 1, said  # and not at every restart
        assert "after step 5: what the program had done between" in said[0]
        assert "the fault came after" not in job.errors(1)
