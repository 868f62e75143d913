"""A worker that SIGKILL does not end: its rank is dead, and its devices get no other process."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.hosts.agents import Hosts, address
from launch.runs import WORKER, Run
from outlast.coordination.deciding import GONE
from procs import NET_S
from unkillable import unkillable

LAUNCHER = """
from outlast.launch.agent import stuck_workers

stuck_workers.STUCK_S = 1.0
"""
STUCK = "was not ended by SIGKILL within 1 s"


@pytest.mark.slow
def test_its_rank_is_dead_and_not_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", launcher=LAUNCHER) as run:
        first = [run.ready(rank) for rank in range(2)]
        store = run.store()
        store.put("call/claim/1", b"its token")
        run.set_job("running", prefix="call/")
        with unkillable(first[1].pid):
            first[1].kill()
            run.until_said("not replaced, its devices are not used again")
            assert f"rank 1 (pid {first[1].pid}) {STUCK}" in run.err
            assert store.wait_for(GONE, NET_S) == b"[1]\n"
        assert run.complete(first[0]) == 0
    assert run.words[-2].endswith(": lost")


@pytest.mark.slow
@pytest.mark.parametrize("restarting", [False, True])
def test_without_a_wrapper_it_ends_the_job(tmp_path: Path, restarting: bool) -> None:
    """Also while all workers are restarted, because of another one."""
    options = ("--nproc-per-node=2", "--max-restarts=3")
    with Run(tmp_path, WORKER, *options, launcher=LAUNCHER) as run:
        first = [run.ready(rank) for rank in range(2)]
        with unkillable(first[1].pid):
            first[1].kill()
            if restarting:
                first[0].fail()
            run.until_said("this ends the job")
        assert run.wait() in (137, 3)
    assert STUCK in run.err


@pytest.mark.slow
def test_its_host_leaves_a_job_on_many_hosts(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2", launcher=LAUNCHER) as hosts:
        one, two = hosts.start_all(2)
        first = one.ready(0), two.ready(1)
        spare = hosts.start(4)
        one.set_job("running")
        spare.until_said("this one is a spare")
        with unkillable(first[1].pid):
            first[1].kill()
            assert two.wait() == 69
            taken = spare.ready(1)
        assert f"({address(3)}) gets no more ranks: rank 1 (pid {first[1].pid}) {STUCK}" in two.err
        one.set_job("completed")
        for worker in (first[0], taken):
            worker.succeed()
        assert [one.wait(), spare.wait()] == [0, 0]
