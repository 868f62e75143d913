"""The report names the hosts that a job has lost."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from events.synthetic_run import SyntheticRun
from events.test_goodput import own
from outlast.events import (
    BarrierPassed,
    HostJoined,
    HostLost,
    NothingToRestore,
    StepsDone,
    WorkerExited,
)
from outlast.events.report import build, render_report
from outlast.events.report.sentences import describe
from outlast.events.report.words import cause_text

LOST = {"host_id": "c-1", "name": "c", "address": "10.0.0.3", "reason": "no heartbeat for 3.6 s"}


def test_a_lost_host_is_named_once() -> None:
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    for host, at in (("a", 10.0), ("b", 11.0)):  # each launcher writes what it has learned
        joined = HostJoined(host=host, pid=1, time=1.0, host_id="c-1", name="c", address="10.0.0.3")
        lost = HostLost(host=host, pid=1, time=at, **LOST)  # type: ignore[arg-type]
        run.events += [joined, lost]
    report = build(run.events)
    assert [(loss.name, loss.seen_by) for loss in report.hosts_lost] == [("c", "a")]
    text = io.StringIO()
    render_report(report, Console(file=text, width=200))
    sentence = (
        "Host c (10.0.0.3) was lost, 10.000 s into the run as a saw it: no heartbeat for 3.6 s."
    )
    assert text.getvalue().count(sentence) == 1


def test_the_exit_of_a_fresh_host_is_not_that_of_the_lost_one() -> None:
    # A fresh host with the same name, such as a replaced pod, counts its processes from 1 too.
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    run.restart(at=5.0, lost=[1], joiners=["b"])
    run.complete(at=9.0)
    exited = WorkerExited(host="b", pid=1, time=9.5, worker_pid=1001, exit_code=0)
    events = [dataclasses.replace(e, pid=1001) if e.member == 2 else e for e in run.events]
    report = build([*events, exited])
    (restart,) = report.restarts
    assert [(party.rank, party.reason) for party in restart.lost] == [(1, "")]
    text = io.StringIO()
    render_report(report, Console(file=text, width=200))
    assert "rank 1: lost" in text.getvalue()  # not "new ranks joined"
    assert "No fault" not in text.getvalue()


def run_without_a_host() -> SyntheticRun:
    """Host b with rank 1 loses power at 8 s: nothing is heard of it for 6 s."""
    run = SyntheticRun(hosts=["a", "b", "c"], offsets={"b": 500.0, "c": 9000.0})
    run.begin(at=0.0)
    own(run, 0, NothingToRestore(), 1.0)
    own(run, 1, StepsDone(first=0, last=7), 7.5)  # the last sign of host b
    for member in (0, 2):
        own(run, member, StepsDone(first=0, last=8), 8.0)
        reset = "RuntimeError: Connection reset by peer"
        run.fault(member, at=12.0, cause=reset, consequence=True)
    for host, offset in (("a", 0.0), ("c", 9000.0)):
        lost = HostLost(
            host=host,
            pid=1,
            time=offset + 14.0,
            host_id="b-1",
            name="b",
            address="10.0.0.2",
            reason="no heartbeat for 6.0 s",
        )
        run.events.append(lost)
    for member in (0, 2):
        run.write(member, BarrierPassed(name="replacements", seconds=5.0), 19.0)
    run.restart(at=19.0, lost=[1], joiners=["b"])
    for member in run.view:
        own(run, member, NothingToRestore(), 20.0)
    run.complete(at=30.0)
    return run


def test_the_loss_of_a_host_is_the_first_cause_of_broken_connections() -> None:
    report = build(run_without_a_host().events)
    (restart,) = report.restarts
    assert restart.host_loss is not None
    assert restart.host_loss.name == "b"
    assert cause_text(restart) == "host b: lost"
    text = " ".join(describe("restart", restart, report))
    assert text.startswith("Host b (10.0.0.2) was lost, ")
    assert "Probably as a consequence, ranks 0 and 2 failed: RuntimeError: Connection" in text
    assert [(each.what, each.where) for each in report.causes] == [("host lost", (("b", 1),))]
    assert [(each.host, each.count) for each in report.host_counts] == [("b", 1)]


def test_the_lane_of_a_rank_ends_with_the_last_sign_of_its_host() -> None:
    (host,) = [each for each in build(run_without_a_host().events).timeline if each.host == "b"]
    lane = next(lane for lane in host.lanes if lane.name == "rank 1")
    assert [(span.state, span.start, span.end) for span in lane.spans] == [
        ("training", 0.0, 7.5),
        ("lost", 7.5, 30.0),
    ]


def test_the_wait_for_a_host_that_is_lost_is_not_time_of_redone_steps() -> None:
    hosts = {host.host: host for host in build(run_without_a_host().events).hosts}
    assert hosts["a"].lost.hang == 4.0, "from the last heartbeat of b, at 8 s, to the reset"
    assert hosts["a"].lost.redone == 8.0 - 1.0
    assert hosts["b"].lost.hang == 0.0
    assert hosts["b"].lost.redone == 7.5 - 0.0, "until its last sign, not until it joined again"
    assert hosts["b"].lost.restart == 19.5 - 7.5
    assert hosts["b"].lost.replacements == 19.0 - 7.5
    for host in hosts.values():
        assert host.wall_seconds == 30.0


def test_a_rank_that_failed_by_itself_stays_the_first_cause() -> None:
    run = run_without_a_host()
    run.iteration, run.view = 0, [0, 1, 2]
    run.fault(2, at=11.0)
    (restart,) = build(run.events).restarts
    assert restart.host_loss is None
    assert cause_text(restart) == "rank 2: ValueError"


def test_an_earlier_death_on_the_host_is_not_its_loss() -> None:
    run = SyntheticRun(hosts=["a", "b"], offsets={"b": 500.0})
    run.begin(at=0.0)
    run.death(1, at=3.0)
    run.restart(at=3.0, lost=[1], joiners=["b"])
    run.fault(0, at=8.0, cause="RuntimeError: Connection reset", consequence=True)
    lost = dict(LOST, host_id="b-1", name="b")
    run.events.append(HostLost(host="a", pid=1, time=9.0, **lost))  # type: ignore[arg-type]
    run.restart(at=8.0, lost=[2], joiners=["b"])
    run.complete(at=20.0)
    first, second = build(run.events).restarts
    assert first.host_loss is None
    assert second.host_loss is not None
