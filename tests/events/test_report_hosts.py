"""The report names the hosts that a job has lost."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from events.synthetic_run import SyntheticRun
from outlast.events import HostJoined, HostLost, WorkerExited
from outlast.events.report import build
from outlast.events.report.render import render_report

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
