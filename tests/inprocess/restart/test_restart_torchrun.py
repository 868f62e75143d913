"""Under a real torchrun, which hosts the store: exceptions and hangs recover in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from inprocess.job_output import errors, events, full, views
from procs import Job
from zygote import Zygote

SCRIPTS = Path(__file__).parents[1] / "scripts"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args"),
    [
        pytest.param("faults", ("one_fails", "exception"), id="exception"),
        pytest.param("lost", ("one_hangs", "python", "pings"), id="hang"),
    ],
)
def test_a_fault_recovers_in_place(
    tmp_path: Path, zygote: Zygote, script: str, args: tuple[str, ...]
) -> None:
    command = (*TORCHRUN, str(SCRIPTS / f"{script}.py"), *args)
    with Job(tmp_path, "-m", nprocs=1, args=command, spawn=zygote.launch) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        pids = {(line["rank"], line["pid"]) for line in events(job, 0, "entered")}
        assert len(pids) == 2, "a process was started anew"
        assert sorted(line["value"] for line in events(job, 0, "returned")) == [0, 1]
