"""R6 for hangs: the rank that hangs is named, not one that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.job_output import assert_never_together, errors, full, views
from outlast.events.report import build, load
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.parametrize(
    "how",
    ["work", *(pytest.param(how, marks=pytest.mark.slow) for how in ("collective", "receive"))],
)
def test_the_culprit_of_a_hang_is_named_though_its_victims_time_out_first(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("culprit", "one_hangs_and_others_time_out", how, nprocs=4, env=env) as job:
        job.start_all()
        assert job.wait_all() == dict.fromkeys(range(4), 0), errors(job)
        assert views(job) == {0: full(4), 1: full(4)}
        assert_never_together(job)
        for rank in range(4):  # only the rank that hung says it
            said = "restart of iteration 0: rank 2 on " in job.errors(rank)
            assert said == (rank == 2), errors(job)
        report = build(load(logs))
        assert report.hosts[0].lost.hang > 0
        (restart,) = report.restarts
        assert restart.cause is not None
        assert (restart.cause.rank, restart.cause.consequence) == (2, False)
        assert all(other.consequence for other in restart.others), restart.others
        assert restart.phases.detection is not None
