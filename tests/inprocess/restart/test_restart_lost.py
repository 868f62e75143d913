"""Processes that are killed, stopped or hang: the others continue, and no process is left over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from inprocess.job_output import assert_never_together, errors, events, full, returned, said, views
from launch.hosts.served_store import ServerProcess
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.stores.torch_store import TorchStore
from outlast.events.fault_record import FaultRecord
from outlast.events.report import build, load
from procs import Job
from unkillable import unkillable

Ranks = Callable[..., Job]
KILLED = -signal.SIGKILL
WAITS = "killed_by_the_test"


@contextlib.contextmanager
def _host() -> Iterator[tuple[TorchStore, dict[str, str]]]:
    """The store server of a host, and what its launcher tells the ranks."""
    with ServerProcess() as server:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        agent = {
            "OUTLAST_AGENT": "1",
            "OUTLAST_HOST_ADDR": "127.0.0.1",
            "OUTLAST_STORE": f"127.0.0.1:{server.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        yield TorchStore(store, ""), agent


def _ready(job: Job, iteration: int = 0) -> dict[int, int]:
    """Waits until all ranks are in the function; returns the pids of their monitors."""
    lines = {
        rank: job.wait_for_line(rank, said("ready", iteration=iteration))
        for rank in range(job.nprocs)
    }
    return {rank: line["monitor"] for rank, line in lines.items()}


def test_the_main_process_of_rank_0_is_killed(ranks: Ranks) -> None:
    # Its monitor serves the store until the others are done; `Job` checks that it then ends.
    with ranks("lost", "killed_by_the_test", nprocs=3) as job:
        job.start_all()
        _ready(job)
        job.kill(0)
        assert job.wait_all() == {0: KILLED, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}
        assert_never_together(job)


@pytest.mark.slow
def test_a_rank_that_sigkill_does_not_end(ranks: Ranks) -> None:
    """It waits in the kernel for ever, and the others continue."""
    with ranks("lost", "killed_without_effect", nprocs=3) as job:
        job.start_all()
        _ready(job)
        with unkillable(job.pid(1)):
            job.send(1, signal.SIGKILL)
            assert [job.wait(0), job.wait(2)] == [0, 0], errors(job)
        assert job.wait(1) == KILLED
        assert views(job) == {0: full(3), 1: full(2)}


def test_a_monitor_process_is_killed_and_replaced(ranks: Ranks, tmp_path: Path) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("lost", "killed_by_the_test", nprocs=2, env=env) as job:
        job.start_all()
        monitors = _ready(job)
        os.kill(monitors[1], signal.SIGKILL)
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        after = events(job, 1, "ready")[1]["monitor"]
        assert after != monitors[1]
        assert events(job, 0, "ready")[1]["monitor"] == monitors[0]
        assert "its monitor process" in job.errors(1)
    (restart,) = build(load(logs)).restarts
    assert restart.cause is not None
    assert (restart.cause.rank, restart.cause.message) == (
        1,
        f"its monitor process {monitors[1]} ended",
    )


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_main_and_monitor_are_killed_together(ranks: Ranks, nprocs: int) -> None:
    with ranks("lost", "killed_by_the_test", nprocs=nprocs) as job:
        job.start_all()
        monitors = _ready(job)
        os.kill(job.pid(1), signal.SIGSTOP)  # so that it does not detect the end of its monitor
        os.kill(monitors[1], signal.SIGKILL)
        job.kill(1)
        assert job.wait_all() == {r: KILLED if r == 1 else 0 for r in range(nprocs)}, errors(job)
        assert views(job) == {0: full(nprocs), 1: full(nprocs - 1)}
        assert "heartbeat timeout" in job.errors(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "pings"),
    [
        pytest.param("stop", "silent", marks=pytest.mark.slow),
        ("stop", "long"),
        pytest.param("gil", "silent", marks=pytest.mark.slow),
        pytest.param("native", "pings", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_cannot_be_interrupted_is_ended(ranks: Ranks, how: str, pings: str) -> None:
    with ranks("lost", "one_hangs", how, pings, nprocs=3) as job:
        job.start_all()
        codes = job.wait_all()
        assert (codes.pop(0), codes.pop(2)) == (0, 0), errors(job)
        assert codes[1] in (KILLED, -signal.SIGTERM)
        assert views(job) == {0: full(3), 1: full(2)}


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_while_it_waits_for_the_others_is_ended(
    ranks: Ranks, tmp_path: Path
) -> None:
    args = ("gil_held_in_the_wait", str(tmp_path / "held"))
    with ranks("lost", *args, nprocs=2, env={"OUTLAST_EVENTS_DIR": str(tmp_path)}) as job:
        job.start_all()
        codes = job.wait_all()
        assert codes.pop(0) == 0, errors(job)
        assert codes[1] in (KILLED, -signal.SIGTERM)
        assert list(views(job).values()) == [full(2), full(1)]
    reports = "".join(file.read_text() for file in tmp_path.glob("monitor-*.jsonl"))
    assert "no Python code has run for " in reports


@pytest.mark.slow
def test_a_rank_that_hangs_after_a_ping_is_interrupted_and_takes_part(ranks: Ranks) -> None:
    with ranks("lost", "one_hangs", "python", "pings", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert "soft timeout" in job.errors(1)
        assert_never_together(job)


@pytest.mark.slow
def test_the_monitor_is_woken_when_a_long_phase_ends(ranks: Ranks) -> None:
    """It would look again after 200 s; the limit is a fraction of a second again."""
    with ranks("lost", "hangs_after_a_long_phase") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}


@pytest.mark.slow
def test_an_adaptive_timeout_sees_a_hang_and_leaves_long_phases_alone(ranks: Ranks) -> None:
    with ranks("lost", "adaptive") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        assert len(events(job, 0, "long phase over")) == 1
        assert "rank 1 on" in job.errors(1)
        assert "soft timeout 60" not in job.errors(0)


def test_a_reserve_takes_over(ranks: Ranks) -> None:
    with ranks("lost", "reserve", "fault", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: KILLED, 2: 0}, errors(job)
        assert returned(job) == {0: "0 of 2", 2: "2 of 2"}
        assert views(job) == {0: full(2), 1: full(2)}


def test_a_reserve_that_is_not_needed_returns_none(ranks: Ranks) -> None:
    with ranks("lost", "reserve", nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert returned(job) == {0: "0 of 2", 1: "1 of 2", 2: None}


def test_a_lost_host_is_reported_by_another_ones_launcher(ranks: Ranks) -> None:
    with _host() as (store, agent), ranks("lost", WAITS, nprocs=3, env=agent) as job:
        for rank, host in enumerate(("a", "b", "b")):
            job.start(rank, {"OUTLAST_HOST": host})
        monitors = _ready(job)
        for rank in (1, 2):
            os.kill(job.pid(rank), signal.SIGSTOP)  # so that it does not replace its monitor
            os.kill(monitors[rank], signal.SIGKILL)
        for rank in (1, 2):
            job.kill(rank)
        record = json.loads(store.read("outlast/job") or b"")
        membership = MembershipProtocol(Link(record["prefix"]), 3)
        cause = FaultRecord(0, -1, -1, "h2", 0, "UNRESPONSIVE", "host h2 is lost")
        ranks_of_b = range(1, 3)
        assert drive(
            membership.report_ended("b", ranks_of_b, cause), perform_on(store)
        ) == frozenset(ranks_of_b)
        drive(membership.give_up(frozenset(ranks_of_b)), perform_on(store))
        assert job.wait_all() == {0: 0, 1: KILLED, 2: KILLED}, errors(job)
        assert views(job) == {0: full(3), 1: full(1)}
        assert "host h2 is lost" in job.errors(0)


def test_a_live_rank_that_is_mistaken_for_lost_leaves_and_can_be_replaced(ranks: Ranks) -> None:
    # The launcher replaces only a process that has ended, and the others wait for a replacement.
    with _host() as (store, agent), ranks("lost", WAITS, nprocs=2, env=agent) as job:
        for rank, host in enumerate("ab"):
            job.start(rank, {"OUTLAST_HOST": host})
        _ready(job)
        record = json.loads(store.read("outlast/job") or b"")
        membership = MembershipProtocol(Link(record["prefix"]), 2)
        cause = FaultRecord(0, -1, -1, "h2", 0, "UNRESPONSIVE", "host h2 is lost")
        drive(membership.report_ended("b", range(1, 2), cause), perform_on(store))
        assert job.wait(1) == 1, errors(job)
        assert "the other ranks count this one as lost: host h2 is lost" in job.errors(1)
        job.start(1, {"OUTLAST_HOST": "c", "OUTLAST_REPLACEMENT": "1"})
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
